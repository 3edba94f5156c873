"""AgentDojo's speed and memory, by hand: python -m tests.bench_agentdojo

64 ground-truth episodes side by side, environments built anew each time, and the process's memory over 1,000 episodes.
"""

import random
import resource
import time

from envs import scripted
from envs.agentdojo import AgentDojo


def memory() -> float:
    """Resident MiB now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    start = time.perf_counter()
    env = AgentDojo()
    print(f"start {time.perf_counter() - start:.1f} s")
    tasks = env.tasks("all")
    random.Random(0).shuffle(tasks)
    done = 0
    for i in range(0, 1024, 64):
        part, start, cpu = tasks[i : i + 64], time.perf_counter(), time.process_time()
        rollouts = scripted.play(env, part, [scripted.ground_truth(env, t) for t in part])
        assert all(r.score.metrics["utility"] for r in rollouts)
        done += len(part)
        print(f"{len(part)} episodes in {time.perf_counter() - start:5.1f} s ({time.process_time() - cpu:5.1f} s of CPU time), "
              f"{done:5} so far: {memory():6.0f} MiB")


if __name__ == "__main__":
    main()
