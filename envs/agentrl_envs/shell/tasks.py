"""Trees of files, and what to do in them: each task with its goal and a command that reaches it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentrl_envs.shell.goals import ANSWER, Answer, Goal, Script, Tree
from agentrl_envs.shell.scripts import NAMES, SCRIPTS, WORDS

FOLDERS = ("north", "south", "east", "west", "old", "new", "spare", "main", "first", "second")
LEVELS = ("ERROR", "WARNING", "NOTICE")
HIDDEN_RUNS = 3


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, the files at the start, what must be reached, and a command that reaches it."""

    text: str
    files: dict[str, str]
    goal: Goal
    command: str


def make_task(seed: int | None, task: str, files: int, depth: int) -> Task:
    """A task of this kind, or of any; `files` in the tree, in folders at most `depth` deep."""
    rng = random.Random(seed)
    kind = rng.choice(sorted(TASKS)) if task == "any" else task
    return TASKS[kind](rng, files, depth)


def _tree(rng: random.Random, root: str, count: int, depth: int, ends: tuple[str, ...]) -> list[str]:
    """Paths of `count` files; the ends of their names take turns, so that there are some of each."""
    paths: dict[str, None] = {}
    while len(paths) < count:
        folders = rng.choices(FOLDERS, k=rng.randint(0, depth))
        name = f"{rng.choice(WORDS)}{rng.randint(1, 99)}{ends[len(paths) % len(ends)]}"
        paths["/".join([root, *folders, name])] = None
    return list(paths)


def _prose(rng: random.Random, least: int, most: int) -> list[str]:
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) for _ in range(rng.randint(least, most))]


def _count(rng: random.Random, files: int, depth: int) -> Task:
    word, made, found = rng.choice(LEVELS), {}, 0
    for path in _tree(rng, "logs", files, depth, (".log", ".log", ".txt", ".log.old")):
        lines = [f"{rng.choice((*LEVELS, 'error', 'fine'))}: {line}" for line in _prose(rng, 3, 9)]
        found += sum(word in line for line in lines) if path.endswith(".log") else 0
        made[path] = "\n".join(lines) + "\n"
    text = (
        f"How many lines of the files below logs/ whose names end in .log contain {word}, in capital letters? "
        f"Write the number to {ANSWER}."
    )
    return Task(text, made, Answer(str(found)), f"grep -rh --include='*.log' {word} logs | wc -l > {ANSWER}")


def _find(rng: random.Random, files: int, depth: int) -> Task:
    paths = _tree(rng, "notes", files, depth, (".txt", ".md"))
    made = {path: [f"code: {rng.randint(1000, 9999)}x", *_prose(rng, 3, 12)] for path in paths}
    code, wanted = rng.randint(1000, 9999), rng.choice(paths)
    made[wanted].insert(rng.randint(1, len(made[wanted])), f"code: {code}")
    texts = {path: "\n".join(lines) + "\n" for path, lines in made.items()}
    text = f"Exactly one file below notes/ has the line 'code: {code}'. "
    find = f"grep -rlx 'code: {code}' notes"
    if rng.random() < 0.5:
        text += f"Write its path, such as notes/old/lamp3.txt, to {ANSWER}."
        return Task(text, texts, Answer(wanted), f"{find} > {ANSWER}")
    text += f"Write how many lines that file has to {ANSWER}."
    return Task(text, texts, Answer(str(len(made[wanted]))), f"cat $({find}) | wc -l > {ANSWER}")


def _sum(rng: random.Random, files: int, depth: int) -> Task:
    name, made, total = rng.choice(NAMES), {}, 0
    for path in _tree(rng, "stock", files, depth, (".csv", ".csv", ".bak")):
        rows = [(rng.randint(1, 31), rng.choice(NAMES), rng.randint(1, 90)) for _ in range(rng.randint(3, 9))]
        total += sum(amount for _, who, amount in rows if who == name) if path.endswith(".csv") else 0
        made[path] = "day,name,amount\n" + "".join(f"{day},{who},{amount}\n" for day, who, amount in rows)
    text = (
        f"The files below stock/ whose names end in .csv have the columns day, name, amount. Write the sum of the "
        f"amounts of {name}, in all of them together, to {ANSWER}."
    )
    awk = f"awk -F, '$2 == \"{name}\" {{ sum += $3 }} END {{ print sum + 0 }}'"
    return Task(text, made, Answer(str(total)), f"find stock -name '*.csv' -exec cat {{}} + | {awk} > {ANSWER}")


def _rename(rng: random.Random, files: int, depth: int) -> Task:
    old, new = rng.sample((".jpeg", ".text", ".dat", ".htm"), 2)
    made = {path: "\n".join(_prose(rng, 1, 3)) + "\n" for path in _tree(rng, "box", files, depth, (old, ".md", old))}
    moved = {path: path.removesuffix(old) + new for path in made if path.endswith(old)}
    text = (
        f"Rename every file below box/ whose name ends in {old}: the new name ends in {new} instead. Each stays in "
        "its folder with its content, and all other files stay as they are."
    )
    goal = Tree("box", {moved.get(path, path): content for path, content in made.items()}, tuple(moved.items()))
    loop = f"""find box -name '*{old}' | while read -r f; do mv "$f" "${{f%{old}}}{new}"; done"""
    return Task(text, made, goal, loop)


def _edit(rng: random.Random, files: int, depth: int) -> Task:
    port, made = rng.randint(8000, 8999), {}
    for path in _tree(rng, "config", files, depth, (".conf", ".conf", ".conf.old", ".txt")):
        lines = [f"name = {rng.choice(WORDS)}", f"port = {rng.randint(1000, 7999)}", f"report = {rng.randint(1, 9)}"]
        made[path] = "\n".join(rng.sample(lines, 3)) + "\n"
    expected = dict(made)
    for path in (path for path in made if path.endswith(".conf")):
        lines = [f"port = {port}" if line.startswith("port") else line for line in made[path].splitlines()]
        expected[path] = "\n".join(lines) + "\n"
    text = (
        f"In every file below config/ whose name ends in .conf, change the line 'port = ...' to 'port = {port}'. "
        "Everything else stays as it is, in these files and in all others."
    )
    changed = tuple((path,) for path in made if made[path] != expected[path])
    sed = f"find config -name '*.conf' -exec sed -i 's/^port = .*/port = {port}/' {{}} +"
    return Task(text, made, Tree("config", expected, changed), sed)


def _fix(rng: random.Random, files: int, depth: int) -> Task:
    script = rng.choice(SCRIPTS)
    right, wrong = rng.choice(script.bugs)
    outputs: dict[str, str] = {}  # no two the same: what is shown must not pass for what is hidden
    while len(outputs) < 1 + HIDDEN_RUNS:
        lines = script.draw(rng)
        outputs["\n".join(script.run(lines)) + "\n"] = "\n".join(lines) + "\n"
    runs = [(given, printed) for printed, given in outputs.items()]
    made = {path: "\n".join(_prose(rng, 1, 3)) + "\n" for path in _tree(rng, "attic", files - 3, depth, (".txt",))}
    made |= {"report.py": script.source.replace(right, wrong, 1), "input.txt": runs[0][0], "expected.txt": runs[0][1]}
    text = (
        f"The script report.py {script.told}. It is broken: fix it. It should print expected.txt when it reads "
        "input.txt, and is judged with other inputs. Only report.py counts."
    )
    return Task(text, made, Script("report.py", tuple(runs[1:])), f"cat > report.py <<'END'\n{script.source}END")


TASKS: dict[str, Callable[[random.Random, int, int], Task]] = {
    "count": _count,
    "edit": _edit,
    "find": _find,
    "fix": _fix,
    "rename": _rename,
    "sum": _sum,
}
