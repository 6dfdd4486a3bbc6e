"""One process of the benchmark: compiles steps, runs and measures them, as it is told on standard input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    """Connects with the other process, then answers requests line by line."""
    from links.priorities import arrange

    coordinator, count, number, other = sys.argv[1], *map(int, sys.argv[2:])
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ratrain_jax as rt

    rt.initialize(coordinator, count, number)
    import jax

    jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))))
    arrange(other)
    from links.steps import Steps

    steps = Steps()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(steps, request.pop("do"))(**request)
        print(json.dumps({"answer": answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
