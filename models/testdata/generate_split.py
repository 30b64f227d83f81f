#!/usr/bin/env python3
"""Splits the tiny GGUF Llama into three pieces, as llama.cpp's gguf-split does.

    python generate_split.py

It needs the gguf and numpy packages of generate.py, reads llama-gguf/ and writes llama-gguf-split/. README.md describes the
files.
"""

import pathlib

import gguf

HERE = pathlib.Path(__file__).resolve().parent
SOURCE, TARGET = HERE / "llama-gguf" / "model.gguf", HERE / "llama-gguf-split"
TENSORS = 8


def main():
    reader = gguf.GGUFReader(SOURCE)
    TARGET.mkdir(exist_ok=True)
    architecture = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(TARGET / "model.gguf", architecture, split_max_tensors=TENSORS)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in TARGET.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
