#!/usr/bin/env python3
"""Writes byte_level.json and sentence_piece.json: small vocabularies and texts encoded by reference tokenizers.

byte_level.json      the first 1200 tokens of SmolLM2 (Apache-2.0) from its GGUF file, encoded by the tokenizers library
                     with the split rules of SmolLM2's own tokenizer.json (digits one by one, then GPT-2's expression).
                     The converter in transformers omits the digits, so it is not used.
sentence_piece.json  a byte-fallback BPE model trained here by sentencepiece on the texts below, encoded by
                     sentencepiece itself.

Run with:   pip install gguf==0.19.0 tokenizers==0.23.3 sentencepiece==0.2.3
            python generate_tokenizers.py SmolLM2-135M-Instruct.Q4_1.gguf
With --full NAME a third file is written, for the whole vocabulary. It is not committed; tests read it from the path in
OCTAVO_TEST_TOKENIZER_GOLDEN.
"""

import argparse
import io
import json
import pathlib
import random

import sentencepiece
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = pathlib.Path(__file__).parent
BYTE_LEVEL_TOKENS = 1200

PROSE = """The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.
A server takes requests, puts them in a queue, and answers when it can; nobody likes to wait for long.
In the beginning there was nothing, and then somebody wrote a parser that read what nobody had written.
Übergrößen, naïve café, señor, smörgåsbord, Ångström, façade; Привет, мир! Καλημέρα κόσμε. 你好，世界。こんにちは世界。
def add(a, b):
    return a + b    # four spaces, then two:  done
for i in range(10):
        print(i, end="")
"""

SNIPPETS = [
    "", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", "a", " a", "a ", " a ", "  a  b   c    ",
    "Hello, world!", "Hello,   world!\n\nBye.", "I'll, you're, he'd, it's, we've, I'm, can't, DON'T, o'clock",
    "1", "12", "123", "1234567890", "3.14159", "1,000,000", "v1.2.3-rc4", "2024-02-29T12:34:56Z", "٣٤٥ १२३ Ⅷ ½ ²",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n", "if (a != b) { return a<=b ? a : b; } // x",
    "{\"key\": [1, 2.5, null, true], \"ключ\": \"значение\"}", "<div class=\"a\">text</div>", "SELECT * FROM t WHERE a='b';",
    "😀", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "text😀text", "é", "e\u0301", "Å A\u030a", "\u0915\u094d\u0937", "한국어", "日本語テキスト", "你好，世界。",
    "Привет, мир!", "Καλημέρα", "שלום", "مرحبا", "ไทย", "\u200b", "a\u200bb", "\ufeff", "\u00a0nbsp\u00a0", "\u2028", "\x00", "a\x00b",
    "\x1b[31mred\x1b[0m", "\U0010ffff", "\ue000", "ﬁ ligature", "ⅷ", "①②③", "x²+y²=z²", "→←↑↓", "…", "—–-", "“quoted” ‘text’",
    "<|im_start|>", "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|>b", "<|im_start|", "<|IM_START|>", " <|im_end|> ",
    "<|endoftext|><|endoftext|>", "<s>", "</s>", "<unk>", "<0x41>", "a<s>b </s> c", "▁", "▁a▁b", "Ġ", "ĠtheĠ", "Ċ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", " " * 33, "\n" * 17, "-" * 40, "=" * 21, "." * 9, "!?" * 8, "ab" * 20,
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE", "https://example.org/a?b=c&d=%20#e", "user@example.org",
    "\\n \\t \\\\ \\u0041", "C:\\Users\\x", "$x_{i}^{2}$", "a/b/c.d", "#!/bin/sh", "100%", "50 €", "£5", "a\tb\tc", "line\r\nline\rline",
]


def texts():
    """Returns a few hundred texts: the snippets, prose, and random mixtures with a fixed seed."""
    rng = random.Random(20240229)
    result = list(SNIPPETS) + PROSE.splitlines(keepends=True)
    alphabets = [
        "abcdefghijklmnopqrstuvwxyz", "ABC xyz 019", " \n\t\r", "0123456789.,-", "'sSdDmMtTlLvVrReE ", "äöüßéèêñçå",
        "абвгдежз ", "你好世界中文 ", "かなカナ漢字", "😀🎉👍🏽\u200d♥\ufe0f", "\u0300\u0301\u0308aeiou", "<|>_im_startend/",
        "{}[]()<>+-*/=!?;:,.\"'`~@#$%^&|\\",
    ]
    while len(result) < 420:
        kind = rng.randrange(3)
        if kind == 0:
            alphabet = rng.choice(alphabets)
            result.append("".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))))
        elif kind == 1:
            mix = "".join(alphabets)
            result.append("".join(rng.choice(mix) for _ in range(rng.randrange(1, 30))))
        else:
            result.append("".join(rng.choice(SNIPPETS) for _ in range(rng.randrange(2, 5))))
    return result


def byte_level(reader, size):
    def field(name):
        return reader.fields["tokenizer.ggml." + name].contents()

    tokens = field("tokens")[:size]
    types = field("token_type")[:size]
    known = set(tokens)
    merges = [merge for merge in field("merges") if merge.replace(" ", "") in known]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
    cases = []
    for text in texts():
        ids = tokenizer.encode(text).ids
        cases.append([text, ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)])
    return {"model": "gpt2", "pre": field("pre"), "tokens": tokens, "token_types": types, "merges": merges, "cases": cases}


def sentence_piece():
    out = io.BytesIO()
    corpus = (PROSE + "\n".join(SNIPPETS[10:38]).replace("\x00", "")).splitlines() * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=out, model_type="bpe", vocab_size=700, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        user_defined_symbols=["<tool>"], hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    size = model.get_piece_size()

    def kind(i):
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.id_to_piece(i) == "<tool>":
            return 4
        return 6 if model.is_byte(i) else 1

    # Intentional differences are left out: here, as in llama.cpp and transformers, names of control tokens in a text
    # are those tokens, and text after an added token starts with a space again.
    cases = []
    for text in texts() + ["a<tool>", "x 1 <tool>"]:
        if any(name in text for name in ("<s>", "</s>", "<unk>", "\x00")) or "<tool>" in text[:-6]:
            continue
        ids = model.encode(text)
        cases.append([text, ids, model.decode(ids)])
    return {
        "model": "llama", "tokens": [model.id_to_piece(i) for i in range(size)], "token_types": [kind(i) for i in range(size)],
        "scores": [model.get_score(i) for i in range(size)], "bos_id": 1, "eos_id": 2, "unk_id": 0, "cases": cases,
    }


def write(path, data):
    lines = [json.dumps(key) + ": " + json.dumps(value, ensure_ascii=True, separators=(",", ":")) for key, value in data.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path, path.stat().st_size, len(data["cases"]), "cases")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--full", type=pathlib.Path)
    arguments = parser.parse_args()
    reader = GGUFReader(arguments.gguf)
    if arguments.full:
        write(arguments.full, byte_level(reader, None))
        return
    write(HERE / "byte_level.json", byte_level(reader, BYTE_LEVEL_TOKENS))
    write(HERE / "sentence_piece.json", sentence_piece())


main()
