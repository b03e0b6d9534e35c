"""Send images to `moetta serve` and print what it sees: python examples/client.py IMAGE ...

Refusals with 429 and 503 are tried again after the time that the service asks for.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import httpx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("images", nargs="*", type=Path)
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--stream", help="whose adapter state answers, and learns")
parser.add_argument("--key", help="an API key")
parser.add_argument("--tries", type=int, default=5)


def predict(client: httpx.Client, image: bytes, tries: int) -> httpx.Response:
    """Post one image; wait and try again where the service says that this can help."""
    headers = {"Content-Type": "application/octet-stream"}
    for left in reversed(range(tries)):
        try:
            answer = client.post("/v1/predict?top_k=3", content=image, headers=headers)
        except httpx.ConnectError:  # restarting; nothing was sent, so nothing is sent twice
            if not left:
                raise
            time.sleep(1)
            continue
        if answer.status_code not in (429, 503) or not left:
            return answer
        # A little at random, so that many clients do not come back at the same moment.
        time.sleep(float(answer.headers.get("Retry-After", 1)) * random.uniform(0.8, 1.2))
    raise AssertionError("not reached")


def main() -> int:
    """Classify the files; 1 if some could not be."""
    options = parser.parse_args()
    if not options.images:
        parser.print_help()
        return 0
    given = {"X-Stream-Id": options.stream, "X-API-Key": options.key}
    headers = {name: value for name, value in given.items() if value}
    failed = 0
    with httpx.Client(base_url=options.url, headers=headers, timeout=30) as client:
        for path in options.images:
            answer = predict(client, path.read_bytes(), options.tries)
            if answer.is_success:
                labels = answer.json()["predictions"][0]["labels"]
                print(f"{path}:", ", ".join(f"{x['label']} {x['probability']:.1%}" for x in labels))
            else:
                failed += 1
                print(f"{path}: {answer.json()['error']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
