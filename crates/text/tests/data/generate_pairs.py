#!/usr/bin/env python3
"""Writes pairs.json: small tokenizers of the kinds that encoders and rerankers have, and pairs of texts encoded by the
tokenizers library.

word_piece      BERT: its normaliser and pre-tokenizer, WordPiece, token types 0 and 1
unigram         XLM-RoBERTa: a table of replacements, Unigram with a visible space, <s> a </s></s> b </s>, one token type
byte_level      ModernBERT: byte-level BPE, [CLS] a [SEP] b [SEP], one token type
roberta         RoBERTa: byte-level BPE with its own post-processor
decoder         Llama: byte-fallback BPE, <s> before each of the texts

The trainer of Unigram does not give the same entries twice, which is why the file holds the tokenizers too.

Each case is [first text, second text or null, most tokens or null, kept side, token ids, token types].

Run with:   pip install tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
            python generate_pairs.py
"""

import io
import json
import pathlib
import random
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).parent

PROSE = """The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.
A query asks for something, and a document may answer it; a reranker reads both and gives a score.
What is the capital of France? Paris is the capital of France. Berlin is the capital of Germany.
Übergrößen, naïve café, señor, façade; Привет, мир! Καλημέρα κόσμε. 你好，世界。こんにちは世界。
def add(a, b):
    return a + b    # four spaces, then two:  done
"""

TEXTS = [
    "", " ", "a", "What is the capital of France?", "Paris is the capital of France.", "Berlin", "naïve café, señor",
    "Привет, мир!", "你好，世界。", "  two  spaces  ", "unseen: \U0001f600 \u0bb5\u0ba3", "[SEP] </s> <s> [CLS]", "a\nb\tc", "\ufb01ne \uff21\uff42 cafe\u0301\u3000man\u0303ana \u00adx\u200by\u2460",
    "it was the best of times, it was the worst of times, " * 3, "The quick brown fox " * 8,
]


def train(tokenizer, trainer):
    tokenizer.train_from_iterator(PROSE.splitlines() * 3, trainer)
    return tokenizer


def ids_of(tokenizer, *tokens):
    return [(token, tokenizer.token_to_id(token)) for token in tokens]


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=260, special_tokens=specials, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=ids_of(tokenizer, "[CLS]", "[SEP]"),
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


# Some of the replacements of XLM-RoBERTa, whose table has 300 kB.
REPLACEMENTS = {
    "\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u200b": "", "\u00ad": "", "\x7f": "", "\ufb01": "fi",
    "\uff21": "A", "\uff42": "b", "e\u0301": "\u00e9", "n\u0303": "\u00f1", "\u2460": "1", "\u0958": "\u0915\u093c",
}


def precompiled():
    """Returns SentencePiece's compiled table of the replacements."""
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for old, new in REPLACEMENTS.items():
            rules.write(" ".join(f"{ord(c):X}" for c in old) + "\t" + " ".join(f"{ord(c):X}" for c in new) + "\n")
        rules.flush()
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(PROSE.splitlines()), model_writer=out, vocab_size=200, hard_vocab_limit=False,
            normalization_rule_tsv=rules.name, num_threads=1, minloglevel=2,
        )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(out.getvalue())
    return normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    # As transformers converts SentencePiece models.
    tokenizer.normalizer = normalizers.Sequence(
        [precompiled(), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "\u2581")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=260, special_tokens=specials, unk_token="<unk>", show_progress=False)
    train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids_of(tokenizer, "<s>", "</s>")
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_level(post_processor):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "</s>", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    train(tokenizer, trainer)
    tokenizer.post_processor = post_processor(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def modern_bert(tokenizer):
    return processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ids_of(tokenizer, "[CLS]", "[SEP]")
    )


def roberta(tokenizer):
    start, end = ids_of(tokenizer, "<s>", "</s>")
    return processors.RobertaProcessing(end, start, True, False)


def decoder():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    train(tokenizer, trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=ids_of(tokenizer, "<s>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def cases(tokenizer, rng):
    result = []
    special = tokenizer.num_special_tokens_to_add(True)
    for first in TEXTS:
        for second in rng.sample(TEXTS, 5) + [None]:
            limits = [(None, "right")] + [(rng.randrange(special + 1, 40), side) for side in ("right", "left")]
            for limit, side in limits:
                tokenizer.no_truncation()
                if limit is not None:
                    # "left" is the side that is removed, so that the ends are kept.
                    tokenizer.enable_truncation(limit, strategy="longest_first", direction=side)
                encoding = tokenizer.encode(first, second)
                result.append([first, second, limit, "start" if side == "right" else "end", encoding.ids, encoding.type_ids])
    tokenizer.no_truncation()
    return result


def main():
    rng = random.Random(20240229)
    made = {
        "word_piece": word_piece(), "unigram": unigram(), "byte_level": byte_level(modern_bert),
        "roberta": byte_level(roberta), "decoder": decoder(),
    }
    lines = []
    for name, tokenizer in made.items():
        data = {"tokenizer": json.loads(tokenizer.to_str()), "cases": cases(tokenizer, rng)}
        lines.append(json.dumps(name) + ": " + json.dumps(data, ensure_ascii=True, separators=(",", ":")))
        print(name, tokenizer.get_vocab_size(), "entries,", len(data["cases"]), "cases")
    path = HERE / "pairs.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path.name, path.stat().st_size)


main()
