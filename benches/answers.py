#!/usr/bin/env python3
"""Asks a server 30 questions with known answers, and one question 40 times, and prints how many answers are right.

    python answers.py URL (chat | text)

It needs only Python, and any server with OpenAI's API, such as `octavo serve`. `chat` asks by /v1/chat/completions.
`text` asks a model without a chat template by /v1/completions: three answered questions come first, and the answer is
the rest of the line. Each question is asked greedily and with five seeds at temperature 0.7 and top-p 0.9. An answer is
right if the expected words are in its first 48 tokens.
"""

import json
import re
import sys
import urllib.request

SEEDS, REPEATS, TOKENS = 5, 40, 48
GREEDY, SAMPLED = dict(temperature=0), dict(temperature=0.7, top_p=0.9)
EXAMPLES = [
    ("What is the capital of Spain?", "Madrid."),
    ("How many minutes are in an hour?", "60."),
    ("What is the opposite of up?", "Down."),
]
# Question, words of the answer.
REPEATED = ("What is the capital of France?", "paris")
QUESTIONS = [
    ("What is the capital of France?", "paris"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the capital of Italy?", "rome"),
    ("What is the capital of Egypt?", "cairo"),
    ("What is 2 + 2?", "4|four"),
    ("What is 7 times 8?", "56|fifty-six"),
    ("What is 10 minus 3?", "7|seven"),
    ("What is the chemical symbol for gold?", "au"),
    ("What is the chemical formula of water?", "h2o|h₂o"),
    ("What is the largest planet of the solar system?", "jupiter"),
    ("Which planet is closest to the Sun?", "mercury"),
    ("Which planet is known as the Red Planet?", "mars"),
    ("How many days are in a week?", "7|seven"),
    ("How many months are in a year?", "12|twelve"),
    ("How many hours are in a day?", "24|twenty-four"),
    ("How many sides does a triangle have?", "3|three"),
    ("How many legs does a spider have?", "8|eight"),
    ("What color is the sky on a clear day?", "blue"),
    ("What is the opposite of hot?", "cold"),
    ("What is the plural of 'mouse'?", "mice"),
    ("What is the past tense of 'go'?", "went"),
    ("Who wrote Romeo and Juliet?", "shakespeare"),
    ("Who painted the Mona Lisa?", "leonardo|da vinci"),
    ("Who was the first president of the United States?", "washington"),
    ("Which language is spoken in Brazil?", "portuguese"),
    ("What is the currency of Japan?", "yen"),
    ("What is the largest ocean on Earth?", "pacific"),
    ("What is the fastest land animal?", "cheetah"),
    ("At how many degrees Celsius does water freeze?", "0|zero"),
    ("How do you say 'thank you' in Spanish?", "gracias"),
]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def ask(url, form, question, parameters):
    body = dict(max_tokens=TOKENS, **parameters)
    if form == "chat":
        body["messages"] = [dict(role="user", content=question)]
        return post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"] or ""
    asked = "".join(f"Question: {known}\nAnswer: {answer}\n\n" for known, answer in EXAMPLES)
    body |= dict(prompt=f"{asked}Question: {question}\nAnswer:", stop=["\n"])
    return post(f"{url}/v1/completions", body)["choices"][0]["text"]


def is_right(answer, words):
    return re.search(rf"(?<!\w)({words})(?!\w)", answer.lower()) is not None


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in ("chat", "text"):
        sys.exit(__doc__)
    url, form = sys.argv[1].rstrip("/"), sys.argv[2]
    right = {"greedy": 0, "sampled": 0}
    for question, words in QUESTIONS:
        greedy = ask(url, form, question, GREEDY)
        sampled = [ask(url, form, question, SAMPLED | dict(seed=seed)) for seed in range(SEEDS)]
        marks = [is_right(answer, words) for answer in [greedy, *sampled]]
        right["greedy"] += marks[0]
        right["sampled"] += sum(marks[1:])
        print(f"{'right' if marks[0] else 'WRONG'}, sampled {sum(marks[1:])} of {SEEDS}: {question} {greedy.strip()!r}")
    question, words = REPEATED
    repeated = sum(is_right(ask(url, form, question, SAMPLED | dict(seed=seed)), words) for seed in range(REPEATS))
    print("\n| prompt | greedy | sampled | one question |\n|---|---|---|---|")
    print(f"| {form} | {right['greedy']} of {len(QUESTIONS)} | {right['sampled']} of {SEEDS * len(QUESTIONS)} "
          f"| {repeated} of {REPEATS} |")


if __name__ == "__main__":
    main()
