"""`agentgym import` on files that are written to take all time or memory, or to read what is none of theirs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
START = "python3 -m verl.trainer.main_ppo"
SECRET = "the value of a secret"


def levels(first: str, line: str, count: int = 11) -> str:
    """Returns lines `a0` to `aN`, in each of which `{0}` is its number and `{1}` that of the line before."""
    return first + "".join(line.format(number, number - 1) for number in range(1, count))


REFUSED = {
    "deep.yaml": ("a: " + "[" * 90_000, "nested more than 100 levels deep"),
    "deep.json": ('{"a": ' * 20_000, "nested more than 100 levels deep"),
    "itself.yaml": ("a: &a {b: *a}", "nested more than 100 levels deep"),
    "aliases.yaml": (
        levels("a0: &a0 [x, x]\n", "a{0}: &a{0} [*a{1}, *a{1}, *a{1}, *a{1}]\n"),
        "more than 5,000 values",
    ),
    "merged.yaml": (
        levels("a0: &a0 {x: 1}\n", "a{0}: &a{0} {{<<: [*a{1}, *a{1}, *a{1}]}}\n"),
        "merge more than 10,000",
    ),
    "digits.yaml": ("a: " + "9" * 5000, "digits"),
    "hexadecimal.yaml": ("a: 0x" + "f" * 5000, "more than 300 digits"),
    "tag.yaml": ("a: !!int ''", "cannot be read as YAML"),
    "pointers.yaml": (f"a: {'x' * 9999}\nb: '{'${a}' * 9999}'\n", "longer by more than 100,000"),
    "lists.yaml": (levels("a0: [x]\n", "a{0}: [" + "'${{a{1}}}', " * 60 + "]\n"), "longer by more than 100,000"),
    "circle.yaml": ("defaults: [second]", "twice"),
    "long.yaml": ("a: " + "x" * 200_000, "more than 128 kB"),
    "variables.sh": (levels("A0=xxxxxxxx\n", "A{0}=" + "$A{1}" * 10 + "\n") + f"{START} a=$A10", "longer by more than"),
    "doubled.sh": ("A=$A$A\nA=$A\n" + START + " a=$A", "longer by more than"),
    "arrays.sh": ("A=(x y)\n" + 'A+=("${A[@]}")\n' * 40 + START + " a=$A", "longer by more than"),
    "parentheses.py": (f"x = {'(' * 5000}1{')' * 5000}", "too many nested parentheses"),
    "signs.py": (f"x = {'-' * 20_000}1", "nested too deeply"),
    "sum.py": (f"GRPOConfig(learning_rate={'+'.join(['1'] * 20_000)})", "recursion"),
    "null.py": ("x = '\0'", "null bytes"),
    "lists.py": (
        levels("a0 = [1, 2]\n", "a{0} = [a{1}, a{1}, a{1}]\n", 40) + "GRPOConfig(output_dir=a39)",
        "more than 5,000 values",
    ),
    "chain.py": (levels("a0 = [1]\n", "a{0} = [a{1}]\n", 2000) + "GRPOConfig(output_dir=a1999)", "nested too deeply"),
}
OPEN = {
    "power.sh": f"{START} data.train_batch_size=$((10**10**10))",
    "powers.sh": f"A=$((9**9**9))\n{START} data.train_batch_size=$A",
    "long_sum.sh": f"{START} data.train_batch_size=$(({'1+' * 20_000}1))",
    "circle.yaml": "data: {train_batch_size: '${data.val_batch_size}', val_batch_size: '${data.train_batch_size}'}",
    "power.py": "GRPOConfig(num_generations=10**10**10)",
    "shift.py": "GRPOConfig(num_generations=1 << 10**12)",
    "circle.py": "a = b\nb = a\nGRPOConfig(num_generations=a)",
    "text.py": "GRPOConfig(num_generations='a' * 10**10)",
}
"""Values that are no constants: they are listed with the way to give one."""


def read(agentgym: Command, name: str, text: str) -> Any:
    Path(name).write_text(text)
    Path("second.yaml").write_text("defaults: [circle]")
    began = time.process_time()
    done = agentgym("import", "trl" if name.endswith(".py") else "verl", name, "--output", "out.yaml", "--json")
    assert time.process_time() - began < 10  # without a bound they take minutes, or all memory
    return done


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_grows_without_bound_is_refused_with_one_line(agentgym: Command, name: str) -> None:
    text, reason = REFUSED[name]
    done = read(agentgym, name, text)
    assert done.code == 2 and done.err.count("\n") == 1 and len(done.err) < 500, done.err[:2000]
    assert done.err.startswith("error: ") and reason in done.err and not Path("out.yaml").exists()


@pytest.mark.parametrize("name", OPEN)
def test_a_value_that_cannot_be_computed_is_listed(agentgym: Command, name: str) -> None:
    done = read(agentgym, name, OPEN[name])
    assert done.code == 0, done.err
    assert "no constant: give it after the file" in " ".join(line["ours"] for line in done.json["lost"])


@pytest.mark.parametrize("entry", ["../other", "/etc/passwd", "", ".", "\\0", "group/part"])
def test_defaults_may_name_anything(agentgym: Command, entry: str) -> None:
    assert read(agentgym, "named.yaml", f'defaults: ["{entry}"]\ndata: {{train_batch_size: 8}}').code == 0


@pytest.mark.parametrize("digits", [301, 5000])
def test_a_number_has_at_most_300_digits(agentgym: Command, digits: int) -> None:
    done = agentgym("import", "verl", __file__, f"data.train_batch_size={'9' * digits}")
    assert done.code == 2
    Path("a.yaml").write_text("data: {train_batch_size: 8}")
    done = agentgym("import", "verl", "a.yaml", f"data.train_batch_size={'9' * digits}")
    assert done.code == 2 and f"{digits:,} digits" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", f"NAME=$TOKEN\n{START} data.train_files=$TOKEN/a.parquet trainer.project_name=${{NAME}}"),
        ("b.sh", f"{START} data.train_files=[${{TOKEN}}/a.parquet] trainer.project_name=${{TOKEN:-mine}}"),
        ("a.yaml", "{data: {train_files: '${oc.env:TOKEN}/a'}, trainer: {project_name: '${oc.env:TOKEN}'}}"),
        ("b.yaml", "{data: {train_files: ['${oc.env:TOKEN}']}, trainer: {project_name: '${oc.env:TOKEN,mine}'}}"),
        ("c.yaml", "{data: {train_files: $TOKEN}, trainer: {project_name: '${oc.env:A_${oc.env:TOKEN}}'}}"),
    ],
)
def test_no_value_of_an_environment_variable_is_copied(
    agentgym: Command, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    done = read(agentgym, name, text)
    assert done.code == 0 and SECRET not in done.out + done.err + Path("out.yaml").read_text()
    lost = {line["theirs"]: line["ours"] for line in done.json["lost"]}
    assert lost["data.train_files"] == "no constant: give it after the file, data.train_files=VALUE"
    assert "TOKEN" in json.dumps(done.json["lost"])


def test_the_home_folder_is_the_only_one_that_is_filled_in(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    done = read(agentgym, "home.yaml", "data: {train_files: '${oc.env:HOME}/a.parquet'}")
    assert done.json["settings"]["data.train"] == ["/home/me/a.parquet"]
