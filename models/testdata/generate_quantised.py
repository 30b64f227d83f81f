#!/usr/bin/env python3
"""Generates tiny Llamas whose weights are quantised in the formats of published checkpoints, with their golden numbers.

    python generate_quantised.py

It needs the packages of generate.py, compressed-tensors==0.20.0 and bitsandbytes==0.50.2, and has the same rules as
generate.py. Weights are compressed and decompressed by those packages; GPTQ and AWQ are packed as their packages do, whose
rules are restated here. README.md describes the files.
"""

import json

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.numpy import save_file
from transformers import LlamaConfig

from generate import COMMON, HERE, as_config, draw, fresh, golden, new_model, readable, rounded, rope, save_torch, write_json

ROOT = HERE / "quantised"
GROUP = 32
# Modules whose weights are stored as they are decompressed.
KEPT = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    fresh(ROOT)
    for seed, (name, (quantise, settings)) in enumerate(METHODS.items(), start=501):
        write(ROOT / name, quantise, settings, seed)
    for path in ROOT.iterdir():
        path.chmod(0o755)
    for path in ROOT.rglob("*.*"):
        if path.is_file():
            path.chmod(0o644)


def write(folder, quantise, settings, seed):
    """Writes a model. One of a mixture has plain keys."""
    fresh(folder)
    config = LlamaConfig(**(COMMON | dict(num_hidden_layers=1, intermediate_size=128)), rope_parameters=rope())
    model = new_model(config)
    stored, plain = {}, {}
    for name, value in draw(model, seed).items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not (folder.name.endswith("mixed") and module.endswith("k_proj")):
            tensors, weight = quantise(torch.from_numpy(value))
            stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
            plain[name] = weight.float().numpy()
        else:
            stored[name] = rounded(value, "bf16")
            plain[name] = stored[name].float().numpy()
    save_torch(stored, folder / "model.safetensors")
    written = as_config(json.loads(config.to_json_string(use_diff=False)), "bf16", 5, type(model).__name__)
    write_json(folder / "config.json", written | {"quantization_config": settings})
    save_file({module: plain[f"{module}.weight"] for module in KEPT}, folder / "expected.safetensors")
    golden(folder / "golden.safetensors", model, plain, seed)


def by_group(weight):
    """Returns the least and the largest values of the groups of a row."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    return groups.amin(-1), groups.amax(-1)


def asymmetric(weight):
    """Returns codes of 4 bits, with scales in f16 and zero points of the groups of a row."""
    least, largest = by_group(weight)
    scales = ((largest - least) / 15).half()
    zeros = torch.clamp(torch.round(-least / scales.float()), 0, 15)
    spread = lambda values: values.float().repeat_interleave(GROUP, 1)
    codes = torch.clamp(torch.round(weight / spread(scales)) + spread(zeros), 0, 15)
    return codes.int(), scales, zeros.int(), (codes - spread(zeros)) * spread(scales)


def symmetric(weight, bits):
    least, largest = by_group(weight)
    middle = 2 ** (bits - 1)
    scales = (torch.maximum(-least, largest) / (middle - 0.5)).half()
    spread = scales.float().repeat_interleave(GROUP, 1)
    codes = torch.clamp(torch.round(weight / spread) + middle, 0, 2 * middle - 1)
    return codes.int(), scales, torch.full(scales.shape, middle, dtype=torch.int32), (codes - middle) * spread


def packed(values, bits, order=None):
    """Packs the last dimension of integers into words, lowest first, or in an order."""
    per_word = 32 // bits
    fields = values.numpy().astype(np.uint32).reshape(*values.shape[:-1], -1, per_word)
    order = range(per_word) if order is None else order
    words = sum(fields[..., source] << np.uint32(bits * field) for field, source in enumerate(order))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(bits=4, sym=True, version=1, act_order=False):
    def quantise(weight):
        columns = weight.shape[1]
        order = torch.arange(columns)
        if act_order:
            order = torch.from_numpy(np.random.default_rng(5).permutation(columns))
        # A group is of inputs that need not be adjacent.
        codes, scales, zeros, values = symmetric(weight[:, order], bits) if sym else asymmetric(weight[:, order])
        back = torch.argsort(order)
        codes, values = codes[:, back], values[:, back]
        mask = 2**bits - 1
        stored = (zeros - 1) & mask if version == 1 else zeros
        return {
            "qweight": packed(codes, bits).T, "qzeros": packed(stored.T.contiguous(), bits), "scales": scales.T,
            "g_idx": (torch.arange(columns) // GROUP)[back].int(),
        }, values
    return quantise


def awq(weight):
    codes, scales, zeros, values = asymmetric(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    pack = lambda matrix: packed(matrix.T.contiguous(), 4, order)
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.T}, values


def fp8(block):
    def quantise(weight):
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        grid = (-(-rows // height), -(-columns // width))
        scales = torch.empty(grid)
        for row, column in np.ndindex(grid):
            part = weight[row * height:(row + 1) * height, column * width:(column + 1) * width]
            scales[row, column] = part.abs().amax() / 448
        spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        stored = {"weight_scale_inv": scales} if block else {"weight_scale": scales.reshape(1)}
        return {"weight": codes} | stored, codes.float() * spread
    return quantise


def compressed(form, make, **arguments):
    def quantise(weight):
        args = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        tensors = compressor.compress({"weight": weight} | make(weight), scheme)
        tensors = {name: value for name, value in tensors.items() if value is not None}
        # The scales are exact in f32, and so are the values.
        exact = tensors | {"weight_scale": tensors["weight_scale"].float()}
        return tensors, compressor.decompress(dict(exact), scheme)["weight"]
    return quantise


def nvfp4(weight):
    """NVFP4 as compressed-tensors packs it, with the values in f32."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    whole = 448 * 6 / weight.abs().amax()
    scales = (weight.view(weight.shape[0], -1, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    given = {"weight": weight, "weight_scale": scales.float(), "weight_global_scale": whole.reshape(1)}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="nvfp4-pack-quantized")
    tensors = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(given, scheme)
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
    values = dequantize(codes, tensors["weight_scale"].float(), global_scale=whole, args=args, dtype=torch.float32)
    return tensors, values


def modelopt_nvfp4(weight):
    """The same numbers as ModelOpt names them; the scale of the matrix is the inverse."""
    tensors, _ = nvfp4(weight)
    whole = 1 / tensors["weight_global_scale"].float()
    codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
    scales = (tensors["weight_scale"].float() * whole).repeat_interleave(16, 1)
    stored = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"], "weight_scale_2": whole.reshape(())}
    return stored, codes * scales


def mxfp4(weight):
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype="torch.uint8")
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="mxfp4-pack-quantized")
    scales = torch.exp2(torch.floor(torch.log2(weight.view(weight.shape[0], -1, 32).abs().amax(-1))) - 2)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    tensors = compressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"]


def middle_scales(weight):
    least, largest = by_group(weight)
    return {"weight_scale": (torch.maximum(-least, largest) / 7.5).bfloat16()}


def shifted_scales(weight):
    least, largest = by_group(weight)
    scales = (largest - least) / 15
    return {"weight_scale": scales, "weight_zero_point": torch.clamp(torch.round(-8 - least / scales), -8, 7).to(torch.int8)}


def row_scales(largest):
    return lambda weight: {"weight_scale": (weight.abs().amax(1, keepdim=True) / largest).bfloat16()}


def four_bits(kind, nested):
    def quantise(weight):
        codes, state = quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
        tensors = {"weight": codes} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return tensors, dequantize_4bit(codes, state)
    return quantise


def eight_bits(weight):
    largest = weight.abs().amax(1)
    codes = torch.round(weight * (127 / largest[:, None])).to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, \
        codes.float() * (largest / 127)[:, None]


GPTQ = dict(quant_method="gptq", group_size=GROUP, damp_percent=0.1)
AWQ = dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm", modules_to_not_convert=None)
INTEGERS = dict(type="int", dynamic=False)


def tensors_config(form, **weights):
    group = {"targets": ["Linear"], "weights": INTEGERS | weights, "input_activations": None, "output_activations": None}
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, ignore=["lm_head"],
                kv_cache_scheme=None, quantization_status="compressed", sparsity_config={}, transform_config={})


W4 = dict(num_bits=4, strategy="group", group_size=GROUP)
W8 = dict(num_bits=8, strategy="channel", symmetric=True)
BITSANDBYTES = dict(quant_method="bitsandbytes", bnb_4bit_quant_storage="uint8", llm_int8_skip_modules=None)
METHODS = {
    "gptq": (gptq(), GPTQ | dict(bits=4, sym=True, desc_act=False)),
    "gptq-8": (gptq(bits=8, version=2), GPTQ | dict(bits=8, sym=True, desc_act=False, checkpoint_format="gptq_v2")),
    "gptq-zeros": (gptq(sym=False), GPTQ | dict(bits=4, sym=False, desc_act=False, checkpoint_format="gptq")),
    "gptq-order": (gptq(act_order=True), GPTQ | dict(bits=4, sym=True, desc_act=True)),
    "gptq-mixed": (gptq(), GPTQ | dict(bits=4, sym=True, desc_act=False)),
    "awq": (awq, AWQ),
    "fp8-block": (fp8((40, 24)), dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[40, 24])),
    "fp8": (fp8(None), dict(quant_method="fp8", activation_scheme="static")),
    "pack-quantized": (compressed("pack-quantized", middle_scales, symmetric=True, type="int", **W4),
                       tensors_config("pack-quantized", symmetric=True, **W4)),
    "pack-quantized-zeros": (compressed("pack-quantized", shifted_scales, symmetric=False, type="int", **W4),
                             tensors_config("pack-quantized", symmetric=False, **W4)),
    "int-quantized": (compressed("int-quantized", row_scales(127.5), type="int", **W8), tensors_config("int-quantized", **W8)),
    "float-quantized": (compressed("float-quantized", row_scales(448), type="float", **W8),
                        tensors_config("float-quantized", **(W8 | dict(type="float")))),
    "nf4": (four_bits("nf4", False), BITSANDBYTES | dict(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="nf4")),
    "nf4-nested": (four_bits("nf4", True), BITSANDBYTES | dict(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                               bnb_4bit_use_double_quant=True)),
    "int8": (eight_bits, BITSANDBYTES | dict(load_in_4bit=False, load_in_8bit=True, llm_int8_threshold=6.0)),
    "fp8-block-32": (fp8((40, 32)), dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[40, 32])),
    "fp4": (four_bits("fp4", False), BITSANDBYTES | dict(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="fp4")),
    "gptq-2": (gptq(bits=2), GPTQ | dict(bits=2, sym=True, desc_act=False)),
    "nvfp4": (nvfp4, tensors_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "modelopt-nvfp4": (modelopt_nvfp4, dict(quant_method="modelopt", quant_algo="NVFP4", ignore=["lm_head"])),
    "mxfp4": (mxfp4, tensors_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
}


if __name__ == "__main__":
    main()
