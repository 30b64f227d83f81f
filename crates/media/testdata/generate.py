#!/usr/bin/env python3
"""Generates the golden results of octavo-media: what Pillow decodes, and what torchvision resizes.

    python generate.py decode      # decode.safetensors
    python generate.py resize      # resize.txt
    python generate.py square      # square.txt
    python generate.py tiles       # tiles.txt

The result is deterministic. The files were generated with these versions:

    python -m pip install pillow==13.0.0 numpy==2.4.6 safetensors==0.8.0 torch==2.15.0 torchvision==0.29.2 transformers==5.23.0

decode.safetensors has two tensors for a case: CASE.file, the bytes of a small file, and CASE.rgb, `[height, width, 3]`.
A line of square.txt names the input size, the longest side of the first step, the side of the square, and the SHA-256 of
the patches of 4 by 4 pixels, in blocks of 3 by 3.
A line of tiles.txt names the input size, the longest side of the first step, the side of a tile, rows and columns of
tiles, and the SHA-256 of such patches of all tiles and the whole image.
A line of resize.txt names filter, input size, output size and the SHA-256 of the resized noise of `noise`.
"""

import hashlib
import io
import pathlib
import random
import struct
import sys
import zlib

import numpy as np
from PIL import Image, ImageOps
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
SIZE = (19, 13)


def noise(width, height, channels=3):
    """Bytes of a linear congruential generator, which the tests repeat."""
    state, out = 1, bytearray()
    for _ in range(width * height * channels):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(state >> 24)
    return np.frombuffer(bytes(out), np.uint8).reshape(height, width, channels)


def smooth(width, height, channels=3):
    """Gradients, which a lossy format keeps."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [(np.sin(x / 5 + c) + np.cos(y / 4 - c) + 2) * 63 for c in range(channels)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def to_rgb(data):
    """As vLLM converts an image for a model: turned upright, transparent pixels over white."""
    image = Image.open(io.BytesIO(data))
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.split()[3])
        return np.asarray(white)
    return np.asarray(image.convert("RGB"))


def png(width, height, depth, colour, rows, *chunks):
    """A PNG file that Pillow does not write."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"".join(b"\0" + row for row in rows)
    chunks = b"".join(chunk(name, content) for name, content in chunks)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunks + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def decode_cases():
    rgb = Image.fromarray(noise(*SIZE))
    rgba = Image.fromarray(noise(*SIZE, 4), "RGBA")
    grey = Image.fromarray(noise(*SIZE, 1)[:, :, 0])
    palette = rgb.quantize(31)
    wide = noise(*SIZE, 12)
    yield "png_rgb", encoded(rgb, "PNG")
    yield "png_rgba", encoded(rgba, "PNG")
    yield "png_grey", encoded(grey, "PNG")
    yield "png_grey_alpha", encoded(Image.merge("LA", (grey, rgba.split()[3])), "PNG")
    yield "png_one_bit", encoded(grey.convert("1"), "PNG")
    yield "png_palette", encoded(palette, "PNG")
    yield "png_palette_trns", encoded(palette, "PNG", transparency=bytes(range(0, 248, 8)))
    yield "png_grey_trns", encoded(grey, "PNG", transparency=int(noise(*SIZE, 1)[0, 0, 0]))
    yield "png_rgb_trns", encoded(rgb, "PNG", transparency=tuple(int(x) for x in noise(*SIZE)[0, 0]))
    for depth in (2, 4):
        row = (SIZE[0] * depth + 7) // 8
        yield f"png_grey_{depth}_bit", png(*SIZE, depth, 0, [bytes(wide[y].reshape(-1)[:row]) for y in range(SIZE[1])])
    for name, colour, channels in (("rgb", 2, 3), ("rgba", 6, 4), ("grey_alpha", 4, 2)):
        row = SIZE[0] * channels * 2
        yield f"png_{name}_16", png(*SIZE, 16, colour, [bytes(wide[y].reshape(-1)[:row]) for y in range(SIZE[1])])
    for orientation in range(1, 9):
        yield f"png_exif_{orientation}", encoded(rgb, "PNG", exif=oriented(orientation))
    yield "webp_lossless", encoded(rgb, "WEBP", lossless=True)
    yield "webp_lossless_alpha", encoded(rgba, "WEBP", lossless=True, exact=True)
    yield "webp_lossless_exif", encoded(rgb, "WEBP", lossless=True, exif=oriented(6))
    frames = [Image.fromarray(noise(*SIZE, 4)[:, ::step], "RGBA").resize(SIZE, 0) for step in (1, 2)]
    yield "webp_animated", encoded(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    yield "gif", encoded(palette, "GIF")
    yield "gif_transparent", encoded(palette, "GIF", transparency=3)
    yield "gif_animated", encoded(palette, "GIF", save_all=True, append_images=[rgb.transpose(0).quantize(20)])
    yield "gif_interlaced", encoded(palette, "GIF", interlace=1)
    # Lossy: compared with a tolerance.
    photo, photo4 = Image.fromarray(smooth(50, 37)), Image.fromarray(smooth(50, 37, 4), "CMYK")
    yield "lossy_webp", encoded(photo, "WEBP", quality=90)
    yield "lossy_webp_alpha", encoded(Image.fromarray(smooth(50, 37, 4), "RGBA"), "WEBP", quality=90)
    for name, sampling in (("444", 0), ("422", 1), ("420", 2)):
        yield f"lossy_jpeg_{name}", encoded(photo, "JPEG", quality=92, subsampling=sampling)
    yield "lossy_jpeg_progressive", encoded(photo, "JPEG", quality=92, progressive=True)
    yield "lossy_jpeg_grey", encoded(photo.convert("L"), "JPEG", quality=92)
    yield "lossy_jpeg_cmyk_adobe", encoded(photo4, "JPEG", quality=95)
    # The four components as luma, two of chroma, and black. The last byte of the Adobe segment says so.
    ycck = bytearray(encoded(photo4, "JPEG", quality=95))
    ycck[ycck.index(b"Adobe") + 11] = 2
    yield "lossy_jpeg_ycck", bytes(ycck)
    plain = bytearray(encoded(photo4, "JPEG", quality=95))
    at = plain.index(b"\xff\xee")
    del plain[at : at + 2 + int.from_bytes(plain[at + 2 : at + 4], "big")]
    yield "lossy_jpeg_cmyk", bytes(plain)
    yield "lossy_jpeg_exif", encoded(photo, "JPEG", quality=92, exif=oriented(8))


def generate_decode():
    tensors = {}
    for name, data in decode_cases():
        tensors[f"{name}.file"] = np.frombuffer(data, np.uint8)
        tensors[f"{name}.rgb"] = np.ascontiguousarray(to_rgb(data))
    save_file(tensors, HERE / "decode.safetensors")


def resize_cases():
    draw = random.Random(20261123)
    yield (50, 37), (50, 37)
    yield (1, 1), (32, 32)
    yield (64, 64), (1, 1)
    yield (700, 9), (32, 32)
    for _ in range(20):
        yield (draw.randint(1, 200), draw.randint(1, 200)), (draw.randint(1, 160), draw.randint(1, 160))


def generate_resize():
    import torch
    from torchvision.transforms.v2 import functional as tv

    torch.set_num_threads(1)
    lines = []
    for size, (width, height) in resize_cases():
        tensor = torch.from_numpy(noise(*size).copy()).permute(2, 0, 1)
        for name in ("bilinear", "bicubic", "lanczos"):
            mode = tv.InterpolationMode(name)
            resized = tv.resize(tensor, [height, width], interpolation=mode, antialias=True)
            digest = hashlib.sha256(resized.permute(1, 2, 0).contiguous().numpy().tobytes()).hexdigest()
            lines.append(f"{name} {size[0]} {size[1]} {width} {height} {digest}\n")
    (HERE / "resize.txt").write_text("".join(lines))


def generate_square():
    """Images that Idefics3 does not split."""
    draw = random.Random(20261124)
    cases = [(50, 37, 96, 24), (1, 1, 24, 24), (300, 2, 48, 24), (2, 300, 48, 24), (24, 24, 24, 24)]
    cases += [(640, 480, 1456, 372)]
    number = draw.randint
    cases += [(number(1, 400), number(1, 400), number(12, 500), 12 * number(1, 20)) for _ in range(24)]
    lines = []
    for case in cases:
        _, _, digest = idefics3(*case, splits=False)
        lines.append(" ".join(map(str, [*case, digest])))
    (HERE / "square.txt").write_text("\n".join(lines) + "\n")


def generate_tiles():
    """Images that Idefics3 splits into tiles."""
    draw = random.Random(20261125)
    # Tiles of 26 pixels have two more than their patches cover.
    cases = [(50, 37, 96, 24), (1, 1, 24, 24), (300, 2, 48, 24), (2, 300, 48, 24), (24, 24, 24, 24), (25, 24, 25, 24)]
    cases += [(90, 50, 60, 26), (10, 40, 35, 26), (640, 480, 1456, 372), (30, 33, 1500, 744)]
    number = draw.randint
    cases += [(number(1, 400), number(1, 400), number(12, 400), 12 * number(1, 20) + number(0, 3)) for _ in range(28)]
    lines = []
    for case in cases:
        if case[2] > 32 * case[3]:
            continue
        lines.append(" ".join(map(str, [*case, *idefics3(*case, splits=True)])))
    (HERE / "tiles.txt").write_text("\n".join(lines) + "\n")


def idefics3(width, height, longest, side, splits):
    """Returns rows and columns of tiles, and the digest of the patches."""
    import torch
    from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor

    processor = Idefics3ImageProcessor(size={"longest_edge": longest}, max_image_size={"longest_edge": side},
                                       do_image_splitting=splits)
    image = torch.from_numpy(noise(width, height).transpose(2, 0, 1).copy())
    result = processor(image, return_tensors="pt", return_row_col_info=True)
    values = torch.round(result["pixel_values"][0] * 127.5 + 127.5).to(torch.uint8).numpy()
    cells = side // 12
    covered = values[:, :, : cells * 12, : cells * 12]
    patches = covered.reshape(-1, 3, cells, 3, 4, cells, 3, 4).transpose(0, 2, 5, 3, 6, 1, 4, 7)
    digest = hashlib.sha256(np.ascontiguousarray(patches).tobytes()).hexdigest()
    return int(result["rows"][0][0]), int(result["cols"][0][0]), digest


if __name__ == "__main__":
    {"decode": generate_decode, "resize": generate_resize, "square": generate_square, "tiles": generate_tiles}[sys.argv[1]]()
