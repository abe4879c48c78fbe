"""Asks a RAD server for the same text without steering and steered both ways: `python examples/rad_client.py`."""

from __future__ import annotations

import argparse
import os

from openai import OpenAI


def main() -> None:
    """Prints four continuations; the last one word by word, with its rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt", default="The movie was")
    parser.add_argument("--beta", type=float, default=30.0)
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key=os.environ.get("RAD_API_KEY", "none"))
    model = client.models.list().data[0].id
    request = {"model": model, "prompt": arguments.prompt, "max_tokens": 32, "temperature": 0.7, "seed": 1}

    plain = client.completions.create(**request)
    print("plain:   ", plain.choices[0].text)
    positive = client.completions.create(**request, extra_body={"rad": {"beta": arguments.beta}})
    print("positive:", positive.choices[0].text)
    negative = client.completions.create(**request, extra_body={"rad": {"beta": arguments.beta, "invert": True}})
    print("negative:", negative.choices[0].text)

    body = {"rad": {"beta": arguments.beta, "top_k": 10}, "rad_trace": True}
    print("streamed:", end="")
    for chunk in client.completions.create(**request, stream=True, extra_body=body):
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
        if trace := (chunk.model_extra or {}).get("rad_trace"):
            rewards = [next(iter(token["rewards"].values())) for token in trace[0]["tokens"] if token["rewards"]]
            print("\nrewards: ", " ".join(f"{reward:.2f}" for reward in rewards))


if __name__ == "__main__":
    main()
