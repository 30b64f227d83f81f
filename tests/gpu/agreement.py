"""One model on the GPU and on the processor: log-probabilities of a text, and greedy answers.

Both round in their own way, so answers may part where two tokens are about as likely; it is a failure where one was clearly ahead.
"""

import argparse
import math
import sys

from servers import ask, serving, write_json

TEXT = (
    "The lighthouse stood at the end of a long causeway that the sea covered twice a day. Its keeper had counted the ships that "
    "passed for thirty years, in a book with a page for every month. In the first of them he had written only names and hours; "
    "later he noted the weather, and what the crews called over the water when the wind was right."
)
QUESTIONS = ["Once upon a time", "The three largest cities of Europe are", "def fibonacci(n):\n", "Water boils at"]

# In nats. The median of a prompt's differences: products of many rows are in 16 bits on both.
MEDIAN = 0.05
# By how much a token may lead and still lose to rounding.
LEAD = 0.5


def measure(octavo, model, device, text, tokens):
    """Log-probabilities of the text's tokens, and of each answer its tokens with the leads of the first over the second."""
    with serving(octavo, *model, "--device", device) as url:
        body = {"model": "default", "temperature": 0, "max_tokens": 1, "prompt": text, "echo": True, "logprobs": 1}
        scored = ask(url, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][1:-1]
        answers = []
        for question in QUESTIONS:
            body = {"model": "default", "temperature": 0, "max_tokens": tokens, "prompt": question, "logprobs": 2}
            logprobs = ask(url, "/v1/completions", body | {"ignore_eos": True})["choices"][0]["logprobs"]
            leads = []
            for top in logprobs["top_logprobs"]:
                first, second, *_ = sorted(top.values(), reverse=True) + [-math.inf]
                leads.append(first - second)
            answers.append((logprobs["tokens"], leads))
    return scored, answers


def compare(found, expected):
    """What is to be reported of two measurements, and whether they agree."""
    differences = sorted(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    median, largest = differences[len(differences) // 2], differences[-1]
    agrees = median <= MEDIAN
    answers = []
    for question, (ours, _), (theirs, leads) in zip(QUESTIONS, found[1], expected[1], strict=True):
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(theirs))
        lead = leads[same] if same < len(theirs) else None
        agrees &= lead is None or lead <= LEAD
        answers.append({"prompt": question, "tokens": len(theirs), "same": same, "lead_where_they_part": lead})
    return {"median": median, "largest": largest, "answers": answers}, agrees


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--octavo", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--characters", type=int, default=len(TEXT), help="of the text, for a model of a short context")
    parser.add_argument("--devices", default="cuda,cpu", help="what is compared, with what")
    parser.add_argument("model", nargs="*", help="a model and its flags; the default model if there is none")
    arguments, flags = parser.parse_known_args()
    found, expected = (
        measure(
            arguments.octavo, arguments.model + flags, device, TEXT[: arguments.characters], arguments.tokens
        )
        for device in arguments.devices.split(",")
    )
    report, agrees = compare(found, expected)
    write_json(arguments.json, report)
    print(f"log-probabilities: off by {report['median']:.4f} in the median, by {report['largest']:.4f} at most")
    for answer in report["answers"]:
        lead = answer["lead_where_they_part"]
        parts = "" if lead is None else f"; there the first token led by {lead:.3f}"
        print(f"{answer['prompt']!r}: the first {answer['same']} of {answer['tokens']} tokens are the same{parts}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
