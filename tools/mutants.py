"""Changes the batcher's decision code one small way at a time and says which tests notice.

    python tools/mutants.py [--only TEXT] [--list]

A comparison turned, a boundary moved by one, a line dropped: tests that pass with such a mutant in
place prove nothing about the rule it broke. Each mutant is built and tested in a copy of the tree;
first with the generated schedules of test_dynamic_properties.py, then with the cases on exact
boundaries. The exit status is the number of mutants that nobody noticed. About ten minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUEUE = "cext/scheduling/batch_queue.pyx"
POLICY = "src/neptrio/scheduling/policy.py"
CONFIG = "src/neptrio/config/validate_config.py"
DYNAMIC = "src/neptrio/scheduling/dynamic.py"
PROPERTIES = ["tests/scheduling/test_dynamic_properties.py"]
CASES = [
    "tests/scheduling/test_batch_queue.py",
    "tests/scheduling/test_dynamic.py",
    "tests/scheduling/test_dynamic_boundaries.py",
    "tests/scheduling/test_policy.py",
    "tests/config/test_validate_config.py",
]
COPIED = ("src", "cext", "tests", "build", "proto", "tools", "setup.py", "pyproject.toml", "README.md")

# (file, text that occurs once in it, what it becomes)
MUTANTS: list[tuple[str, str, str]] = [
    # limits, deadlines, delays: the exact moment
    (QUEUE, "level.size >= level.max_size:", "level.size > level.max_size:"),
    (QUEUE, "level.size >= level.max_size:", "level.size + 1 >= level.max_size:"),
    (QUEUE, "if e.request.deadline_ns > now:", "if e.request.deadline_ns >= now:"),
    (QUEUE, "now - oldest >= self.delay_ns", "now - oldest > self.delay_ns"),
    (QUEUE, "self.wake_ns = oldest + self.delay_ns", "self.wake_ns = oldest + self.delay_ns + 1"),
    (QUEUE, "self.wake_ns = oldest + self.delay_ns", "self.wake_ns = now + self.delay_ns"),
    (
        QUEUE,
        "return request.timestamps[<int>QUEUE_START] + timeout",
        "return request.timestamps[<int>QUEUE_START] + timeout + 1",
    ),
    (
        QUEUE,
        "0 < request.timeout_us < <uint64_t>timeout // 1000",
        "0 <= request.timeout_us < <uint64_t>timeout // 1000",
    ),
    (QUEUE, "0 < request.timeout_us < <uint64_t>timeout // 1000", "0 < request.timeout_us"),
    (QUEUE, "if level.override and 0 <", "if 0 <"),
    (DYNAMIC, "if deadline and deadline <= now_ns:", "if deadline and deadline < now_ns:"),
    (DYNAMIC, "wake == 0 or deadline < wake", "wake == 0 or deadline > wake"),
    (DYNAMIC, "if deadline and (wake == 0 or deadline < wake):", "if deadline and wake == 0:"),
    (DYNAMIC, "wake < self._timer.when_ns", "wake > self._timer.when_ns"),
    (DYNAMIC, "            for request in queue.expire(now_ns):", "            for request in []:"),
    # sizes
    (QUEUE, "if total + size > self.max_batch_size:", "if total + size >= self.max_batch_size:"),
    (QUEUE, "if total + size > self.max_batch_size:", "if total + size > self.max_batch_size + 1:"),
    (QUEUE, "                if total >= self.max_batch_size:", "                if total > self.max_batch_size:"),
    (QUEUE, "self.max_preferred = max(self.preferred)", "self.max_preferred = min(self.preferred)"),
    (QUEUE, "                        passed = True", "                        pass"),
    (QUEUE, "if total in self.preferred:", "if not best and total in self.preferred:"),
    (QUEUE, "if best and not over:", "if best:"),
    (QUEUE, "closed is not None and best_total not in", "closed is not None and best_total in"),
    (QUEUE, "if best_total >= self.max_batch_size:", "if best_total > self.max_batch_size:"),
    (QUEUE, "or best_total >= self.max_preferred", "or best_total > self.max_preferred"),
    (QUEUE, "self.saturated = passed or closed is not None or", "self.saturated = passed or"),
    (QUEUE, "elif total >= self.max_preferred:", "elif total > self.max_preferred + 1:"),
    (QUEUE, "elif self.delay_ns == 0:", "elif self.delay_ns == 1:"),
    (QUEUE, "self.oldest_wait_ns = now - best_oldest", "self.oldest_wait_ns = now - oldest"),
    (QUEUE, "QUEUE_START] < oldest:", "QUEUE_START] > oldest:"),
    (QUEUE, "        self.weight -= request.batch_size", "        pass"),
    (QUEUE, "        self.weight += request.batch_size", "        self.weight += 1"),
    (QUEUE, "        e.level.size -= 1", "        pass"),
    # order
    (QUEUE, "return x < y or", "return x > y or"),
    (QUEUE, "(x == y and a.order < b.order)", "(x == y and a.order > b.order)"),
    (QUEUE, "down + 1 < n and self.sooner", "down + 1 > n and self.sooner"),
    (QUEUE, "                self.link(e, True)", "                self.link(e, False)"),
    (QUEUE, "            if e.level.delay:", "            if not e.level.delay:"),
    (
        QUEUE,
        "level.head if level.head is not None else level.late_head",
        "level.late_head if level.late_head is not None else level.head",
    ),
    (QUEUE, "(p if 0 < p <= n else", "(p if 0 < p < n else"),
    (QUEUE, "else <uint64_t>self.default_level) - 1]", "else 1) - 1]"),
    (QUEUE, "        self.heap_remove(e)\n        self.unlink(e)\n        e.level", "        self.unlink(e)\n        e.level"),
    (QUEUE, "            self.sift(at)\n", "            self.heap[at].at = at\n"),
    # company
    (QUEUE, "if spec.optional or (spec.fixed", "if (spec.fixed"),
    (QUEUE, "                parts.append(found.shape[1:])", "                parts.append(found.shape[2:])"),
    (QUEUE, "parts.append((found.shape[1:], found.tobytes()))", "parts.append(found.shape[1:])"),
    (QUEUE, "if first.signature != e.signature:", "if first.signature != e.signature and total > 1:"),
    # what a policy means
    (POLICY, "bool(self.max_size or self.timeout_us)", "bool(self.max_size and self.timeout_us)"),
    (POLICY, "len(self.levels) > 1 or", "len(self.levels) > 2 or"),
    (POLICY, "message.timeout_action == DELAY", "message.timeout_action != DELAY"),
    (CONFIG, "if size < 1 or", "if size < 0 or"),
    (CONFIG, "size > limit and", "size >= limit and"),
    (CONFIG, "not 1 <= d.default_priority_level <= levels:", "not 1 <= d.default_priority_level < levels:"),
    (CONFIG, "not 1 <= level <= levels:", "not 1 <= level < levels:"),
    (POLICY, "if count > MOST_LEVELS:", "if count >= MOST_LEVELS:"),
    (CONFIG, "        if levels > 1:", "        if levels > 0:"),
    (CONFIG, "policy.timeout_action == DELAY", "policy.timeout_action != DELAY"),
    (POLICY, "or (largest,),", "or (1,),"),
    (POLICY, "MOST_DELAY_US) * 1000,", "MOST_DELAY_US),"),
    (POLICY, "max(count, 1) + 1)", "max(count, 1))"),
    (POLICY, "default_level=batching.default_priority_level if count else 1", "default_level=1"),
    (POLICY, "if i.is_shape_tensor)", "if not i.is_shape_tensor)"),
    # what the scheduler does with it
    (DYNAMIC, "self._prefetch = not policy.exact and", "self._prefetch = policy.exact and"),
    (DYNAMIC, "self._prefetch = not policy.exact and", "self._prefetch ="),
    (DYNAMIC, "self._prefetch = not policy.exact and not pool.limited", "self._prefetch = not policy.exact"),
    (DYNAMIC, "self._prefetch and queue.saturated:", "self._prefetch:"),
    (DYNAMIC, "instance = pool.available(2)", "instance = pool.available(3)"),
    (DYNAMIC, "instance = pool.available(2)", "instance = pool.available(1)"),
    (DYNAMIC, "instance = pool.available(1)\n", "instance = pool.available(2)\n"),
    (DYNAMIC, "            self.dispatch(now_ns)\n", ""),
    (DYNAMIC, "if self._noted or 0 < self._wake <= now_ns:", "if self._noted or 0 < self._wake < now_ns:"),
    (DYNAMIC, "if self._noted or 0 < self._wake <= now_ns:", "if 0 < self._wake <= now_ns:"),
    (DYNAMIC, "        self._wake = wake\n", ""),
    (DYNAMIC, "if self.queue.full and not self._noted and", "if self.queue.full and"),
    (QUEUE, "self.bounded = all(level.max_size for", "self.bounded = any(level.max_size for"),
    (QUEUE, "            if level.size < level.max_size:\n", "            if level.size <= level.max_size:\n"),
    (DYNAMIC, "queue.weight >= queue.max_batch_size or", "queue.weight > queue.max_batch_size or"),
    (DYNAMIC, "self._last_count == 1 and self._model", "self._last_count == 2 and self._model"),
    (DYNAMIC, "            if self.queue.size or self._pool.limited:  # its", "            if self._pool.limited:  # its"),
    (DYNAMIC, "        if self.queue.size or self._pool.limited:\n", "        if self._pool.limited:\n"),
    (DYNAMIC, "            self.order.skip(request)", "            pass"),
    (DYNAMIC, "            self.order.arrived(request)", "            pass"),
    (DYNAMIC, "self.queue.size >= self._hold", "self.queue.size > self._hold"),
    (DYNAMIC, "            self._hold = 0\n", "            pass\n"),
    (DYNAMIC, "self._flushing or self.queue.size", "self.queue.size"),
    (DYNAMIC, "        self._flushing = True\n", ""),
    (DYNAMIC, "if wait_ns > self._wait_max:", "if wait_ns < self._wait_max:"),
    (DYNAMIC, "                    wanting = True\n", ""),
    (DYNAMIC, "        self._rejected_timeout += 1\n", ""),
    (DYNAMIC, "            self._cancelled += 1\n", ""),
]  # fmt: skip


def tests_notice(tree: Path, tests: list[str]) -> bool:
    """True when one of the tests fails, crashes or does not end."""
    environment = dict(os.environ, PYTHONPATH=str(tree / "src"), HYPOTHESIS_PROFILE="mutants")
    command = [sys.executable, "-m", "pytest", "-x", *(t for t in tests if (tree / t).exists())]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode > 1:
        raise SystemExit(f"the tests did not run: {done.stdout.decode()[-2000:]}")
    return done.returncode != 0


def build(tree: Path) -> None:
    """Builds what has changed, in place."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env=dict(os.environ, NEPTRIO_CEXT_DEBUG="1"),  # not optimized: compiles in a third of the time
        capture_output=True,
    )
    if done.returncode:
        raise SystemExit(f"the build failed: {done.stderr.decode()[-2000:]}")


def copy_tree(folder: str) -> Path:
    """A built copy of what the tests need."""
    tree = Path(folder)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True)
        else:
            shutil.copy2(ROOT / name, tree / name)
    build(tree)
    return tree


def run(chosen: list[tuple[str, str, str]]) -> int:
    """Tries the mutants one after the other in a copy of the tree; how many survived."""
    survivors, built = 0, ""
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(folder)
        assert not tests_notice(tree, PROPERTIES + CASES), "the tests must pass before anything is changed"
        for file, old, new in chosen:
            path = tree / file
            original = path.read_text()
            path.write_text(original.replace(old, new))
            if QUEUE in (file, built):
                build(tree)
            built = file
            groups = (("schedules", PROPERTIES), ("cases", CASES))
            seen = [name for name, tests in groups if tests_notice(tree, tests)]
            survivors += not seen
            print(
                f"{'caught by ' + ' and '.join(seen) if seen else 'SURVIVED':<30}"
                f"{Path(file).name}: {old.strip()!r} -> {new.strip()!r}",
                flush=True,
            )
            path.write_text(original)
    return survivors


def occurs_once(file: str, text: str) -> bool:
    """Whether a mutant's text stands in its file, and only there."""
    return (ROOT / file).read_text().count(text) == 1


def main() -> int:
    """Runs every mutant; returns how many survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run the mutants whose text contains this")
    parser.add_argument("--list", action="store_true", help="print the mutants and do nothing")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that work side by side")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in " ".join(m)]
    for file, old, new in chosen:
        assert occurs_once(file, old), f"{file}: '{old}' does not occur once"
        if options.list:
            print(f"{file}: {old.strip()!r} -> {new.strip()!r}")
    if options.list:
        return 0
    with ThreadPoolExecutor(options.jobs) as pool:
        survivors = sum(pool.map(run, [chosen[i :: options.jobs] for i in range(options.jobs)]))
    print(f"{len(chosen)} mutants, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
