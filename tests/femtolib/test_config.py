"""Whether a YAML file and overrides become the values that a person meant, or every fault in them at its place."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from femtolib.config import (
    ConfigModel,
    Count,
    ExistingPath,
    InputPatterns,
    Integer,
    OutputPath,
    PositiveInteger,
    ResumeFrom,
    describe_keys,
    dump_config,
    load_config,
    not_built,
    resolved,
)
from femtolib.errors import FemtoError


class Inner(ConfigModel):
    lr: float = Field(0.5, gt=0, description="how far a step goes")
    betas: list[float] = Field([0.9, 0.95])
    eps: float | None = None


class Outer(ConfigModel):
    number: Integer = 3
    count: Count = 0
    size: PositiveInteger | None = None
    rate: float = 0.5
    switch: bool = False
    text: str = "x"
    maybe: str | None = None
    shape: Literal["round", "square"] = "round"
    optimizer: Inner = Inner()
    data: InputPatterns | None = None
    inputs: InputPatterns | None = None
    folder: ExistingPath | None = None
    output: OutputPath = Path("/somewhere")
    resume: ResumeFrom = "auto"
    later: Annotated[str, Field()] = not_built("none", "a thing to come")


class Required(ConfigModel):
    needed: str = Field(description="what must be given")
    section: Inner
    optional: int = 1


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(text, *overrides)`: the config that a file of this text in the current directory makes."""
    monkeypatch.chdir(tmp_path)

    def load(content: str | bytes = "", *overrides: str, model: type[ConfigModel] = Outer) -> ConfigModel:
        Path("c.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        return load_config(model, Path("c.yaml"), overrides)

    return load


@pytest.fixture
def faults(load):
    """`faults(text, *overrides)`: the lines with which such a config is refused."""

    def faults(content: str | bytes = "", *overrides: str, model: type[ConfigModel] = Outer) -> list[str]:
        with pytest.raises(FemtoError) as caught:
            load(content, *overrides, model=model)
        assert all(fault.splitlines() == [fault] for fault in caught.value.faults)
        return caught.value.faults

    return faults


# ── Scalars ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("number", "7", 7), ("number", "-7", -7), ("number", "+7", 7), ("number", "0", 0), ("number", "1_000", 1000),
        ("number", "1e5", 100_000), ("number", "5E9", 5_000_000_000), ("number", "2.0", 2),
        ("rate", "1e-5", 1e-5), ("rate", "1E-5", 1e-5), ("rate", "1e5", 1e5), ("rate", "3", 3.0), ("rate", ".5", 0.5),
        ("rate", "1.", 1.0), ("rate", "-0.5", -0.5), ("rate", "1_000.5", 1000.5),
        ("maybe", "null", None), ("maybe", "~", None), ("maybe", "None", None), ("maybe", "", None),
        ("size", "None", None), ("optimizer.eps", "None", None), ("maybe", "'None'", "None"),
        ("switch", "true", True), ("switch", "True", True), ("switch", "FALSE", False),
        ("text", "off", "off"), ("text", "yes", "yes"), ("text", "0x10", "0x10"), ("text", "010", "010"),
        ("text", "3:25", "3:25"), ("text", "2024-01-01", "2024-01-01"), ("text", "=", "="), ("text", "<<", "<<"),
        ("text", "a=b=c", "a=b=c"), ("text", "'1e5'", "1e5"), ("text", "é😀", "é😀"), ("text", "nan", "nan"),
        ("optimizer.betas", "[0.5, 1e-3]", [0.5, 1e-3]), ("optimizer.betas", "[]", []),
    ],
)  # fmt: skip
def test_a_scalar_means_the_same_in_a_file_and_as_an_override(load, key, written, value):
    # torchtune#1939: 1e-5 arrived as text, None as a word; LlamaFactory#4014: 010 as 8, 3:25 as 205, off as false.
    section, _, name = key.rpartition(".")
    in_file = load(f"{section}:\n  {name}: {written}\n" if section else f"{key}: {written}\n")
    on_command_line = load("", f"{key}={written}")
    for config in (in_file, on_command_line):
        for part in key.split("."):
            config = getattr(config, part)
        assert config == value and type(config) is type(value)


@pytest.mark.parametrize(
    ("key", "written", "seen"),
    [
        ("number", "010", '"010"'), ("number", "3:25", '"3:25"'), ("number", "0x10", '"0x10"'),
        ("number", "0o7", '"0o7"'),
        ("number", "1.5", "1.5"), ("number", "true", "true"), ("number", "'5'", '"5"'), ("number", "", "null"),
        ("number", "1e400", "Infinity"), ("number", "[1]", "[1]"), ("number", "{a: 1}", '{"a": 1}'),
        ("number", "9223372036854775808", "9223372036854775808"), ("number", "-1e30", "-1e+30"),
        ("count", "-1", "-1"), ("size", "0", "0"),
        ("rate", "abc", '"abc"'), ("rate", ".nan", "NaN"), ("rate", ".inf", "Infinity"), ("rate", "-.Inf", "-Infinity"),
        ("rate", "1e400", "Infinity"), ("rate", "nan", '"nan"'), ("rate", "'1.5'", '"1.5"'), ("rate", "1,5", '"1,5"'),
        ("rate", "00.5", '"00.5"'), ("rate", "3:25.5", "3:25.5"), ("rate", "None", "null"), ("rate", "9" * 400, "999"),
        ("switch", "off", '"off"'), ("switch", "yes", '"yes"'), ("switch", "1", "1"), ("switch", "0.0", "0.0"),
        ("switch", "null", "null"),
        ("text", "5", "5"), ("text", "1e5", "100000.0"), ("text", "true", "true"), ("text", "~", "null"),
        ("shape", "triangle", '"triangle"'), ("shape", "[round]", '["round"]'), ("shape", "null", "null"),
        ("optimizer.betas", "0.9", "0.9"), ("optimizer.betas", "[0.9, x]", '"x"'), ("optimizer.betas", "[.inf]", "Inf"),
        ("optimizer.lr", "-1", "-1"), ("optimizer.lr", "0", "0"), ("optimizer", "5", "5"), ("optimizer", "", "null"),
        ("optimizer", "[]", "[]"), ("later", "soon", '"soon"'),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_key_value_and_place(faults, key, written, seen):
    section, _, name = key.rpartition(".")
    [in_file] = faults(f"{section}:\n  {name}: {written}\n" if section else f"\n{key}: {written}\n")
    [on_command_line] = faults("number: 1", f"{key}={written}")
    assert in_file.startswith(f"c.yaml:2: {key}: ") and seen in in_file
    assert on_command_line.startswith(f"command line: {key}: ") and seen in on_command_line


@pytest.mark.parametrize("digits", [5_000, 100_000])
def test_a_number_of_thousands_of_digits_is_a_fault_like_any_other(faults, digits):
    [fault] = faults("number: " + "9" * digits)
    assert fault.startswith("c.yaml:1: ") and len(fault) < 200


def test_a_long_value_is_shown_cut(faults):
    [fault] = faults("number: " + "x" * 5000)
    assert len(fault) < 160 and fault.endswith("...")
    [fault] = faults("", "number=" + "x" * 5000)
    assert len(fault) < 160
    [fault] = faults("", "number=[" + "x" * 5000)
    assert len(fault) < 250


# ── What is no config at all ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", ["", "# a comment\n", "---\n", "null", "{}", b"\xef\xbb\xbf", "---\n...\n"])
def test_a_file_that_says_nothing_leaves_every_default(load, content):
    assert load(content) == Outer()


@pytest.mark.parametrize(
    ("content", "start", "words"),
    [
        ("- a\n- b\n", "c.yaml:", ["mapping", '["a", "b"]']),
        ("text", "c.yaml:", ["mapping", '"text"']),
        ("number: 1\nrate: [1\n", "c.yaml:3:", ["YAML"]),
        ("number: 1\noptimizer:\n\tlr: 1\n", "c.yaml:3:", ["\\t"]),
        ("number: 1\n---\nnumber: 2\n", "c.yaml:2:", ["document"]),
        (b"number: 1\ntext: \x00\n", "c.yaml:2:", ["\\x00"]),
        (b"number: 1\r\ntext: \x07\r\n", "c.yaml:2:", ["\\x07"]),
        (b"number: 1\ntext: caf\xe9\n", "c.yaml:2:", ["UTF-8"]),
        (b"\xff\xfen\x00u\x00", "c.yaml:1:", ["UTF-8"]),
        ("text: @x\n", "c.yaml:1:", ["@"]),
        ("? [a]\n: 1\n", "c.yaml:1:", ["key"]),
        ("number: 1\n? {a: 1}\n: 1\n", "c.yaml:2:", ["key"]),
        ("number: &x 1\ncount: *x\n", "c.yaml:2:", ["alias"]),
        ("data: &a [*a]\n", "c.yaml:1:", ["alias"]),
        ("text: " + "[" * 5000, "c.yaml:1:", ["nested"]),
        ("text: " + "{a: " * 2000 + "}" * 2000, "c.yaml:1:", ["nested"]),
        ("text: " + "x" * 2_000_000, "c.yaml:", ["1,000,000"]),
        ("".join(f"- line {i}\n" for i in range(500_000)), "c.yaml:", ["1,000,000"]),
    ],
    ids=lambda value: value[:25] if isinstance(value, str | bytes) else "",
)
def test_what_is_no_config_is_refused_by_name_and_line(faults, content, start, words):
    [fault] = faults(content)
    assert fault.startswith(start) and all(word in fault for word in words), fault


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(load, faults):
    config = load("\ufeffnumber: 5\r\ntext: a b\r\noptimizer:\r\n  lr: 1e-3\r\n")
    assert (config.number, config.text, config.optimizer.lr) == (5, "a b", 1e-3)
    assert faults("\ufeffnumber: 5\r\nrate: x\r\n") == ['c.yaml:2: rate: should be a number, got "x"']


@pytest.mark.parametrize("path", ["missing.yaml", ".", "c.yaml/x", "x" * 300])
def test_a_file_that_cannot_be_read_is_named(load, path):
    load()
    with pytest.raises(FemtoError) as caught:
        load_config(Outer, Path(path))
    assert len(caught.value.faults) == 1 and path in caught.value.faults[0]


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(FemtoError, match="/dev/zero"):
        load_config(Outer, Path("/dev/zero"))


@pytest.mark.parametrize(
    "code",
    [
        "!!python/object/apply:os.mkdir [CANARY]",
        "!!python/object/new:os.mkdir [CANARY]",
        "!!python/object/apply:subprocess.check_output [[mkdir, CANARY]]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
        "!!python/tuple [1]",
        "!!binary aGk=",
        "!!set {a}",
        "!!int '5'",
        "!!bool maybe",
        "!!timestamp x",
        "!<tag:yaml.org,2002:python/name:os.system>",
        "!mine x",
        "! x",
    ],
)
@pytest.mark.parametrize("place", ["value", "key", "list", "whole", "override"])
def test_a_tag_is_refused_and_calls_nothing(faults, tmp_path, code, place):
    # BasicSR#768, pyyaml#900: opening a config ran code.
    canary = tmp_path / "canary"
    code = code.replace("CANARY", str(canary))
    written = {"value": f"text: {code}", "key": f"? {code}\n: 1", "list": f"data: [a, {code} ]", "whole": code}
    [fault] = faults(written[place]) if place != "override" else faults("", f"text={code}")
    assert "tags" in fault and "Traceback" not in fault
    assert fault.startswith("override" if place == "override" else "c.yaml:1:")
    assert not canary.exists()


# ── Keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("written", "unknown", "nearest"),
    [
        ("nummber: 1", "nummber", "number"),
        ("Number: 1", "Number", "number"),
        ("optimiser: {lr: 1}", "optimiser", "optimizer"),
        ("lr: 1", "lr", "optimizer.lr"),
        ("optimizer: {beta: [0.1]}", "optimizer.beta", "optimizer.betas"),
        ("optimizer: {number: 1}", "optimizer.number", "number"),
        ("optimizer: {resumee: x}", "optimizer.resumee", "resume"),
        ("optimizer: {frobnicate: 1}", "optimizer.frobnicate", None),
        ("frobnicate: {lr: 1}", "frobnicate", None),
        ("1: x", "1", None),
        ("null: x", "null", None),
        ("~: x", "~", None),
        ("true: x", "true", None),
        ("1.5: x", "1.5", None),
        ("'': x", "", None),
        ("<<: {number: 1}", "<<", None),
        ("optimizer: {2: x}", "optimizer.2", None),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_right_one(faults, written, unknown, nearest):
    [fault] = faults("text: y\n" + written)
    assert fault.startswith(f"c.yaml:2: unknown key {unknown!r}; ")
    assert fault.endswith(f"did you mean {nearest!r}?" if nearest else "`femto run RECIPE --help` lists the keys")


def test_keys_of_the_recipe_that_a_config_is_of_are_told_to_be_its_keys(faults):
    first = "# femto run --nproc-per-node 2 {} --config c.yaml\n"
    *_, last = faults(first.format("other_recipe") + "numbr: 1\nrats: 2\n")
    assert last == "c.yaml: is of other_recipe, by its first line: remove the keys that this recipe has not"
    own = [Path(__file__).stem, f"./{Path(__file__).name}", "'my recipe.py'", "other_recipe seed=1"]
    for text in (first.format("other_recipe") + "number: x\n", *(first.format(name) + "numbr: 1\n" for name in own)):
        assert not any("by its first line" in fault for fault in faults(text))


def test_a_dotted_key_in_a_file_is_refused_with_the_way_to_write_it(faults):
    [fault] = faults("optimizer.lr: 1.0")
    assert "'optimizer.lr'" in fault and "'lr' below 'optimizer:'" in fault


def test_every_key_that_stands_twice_is_told_wherever_it_stands(faults):
    text = "number: 1\noptimizer:\n  lr: 1.0\n  lr: 2.0\nrate: 1.0\n'number': 2\nnumber: 3\n"
    assert faults(text) == [
        "c.yaml:4: key 'lr' stands twice (first in line 3)",
        "c.yaml:6: key 'number' stands twice (first in line 1)",
        "c.yaml:7: key 'number' stands twice (first in line 1)",
    ]
    assert faults("data: [{a: 1, a: 2}]\nrate: 1")[0] == "c.yaml:1: key 'a' stands twice (first in line 1)"
    [fault] = faults("", "optimizer={lr: 1.0, lr: 2.0}")
    assert "optimizer=" in fault and "'lr' stands twice" in fault
    [fault] = faults("optimizer: {lr: 1.0}\noptimizer: {eps: 1.0}\n")
    assert fault.startswith("c.yaml:2: key 'optimizer'")


def test_all_faults_are_told_at_once_each_at_its_place(faults):
    text = "number: x\nnumbr: 1\noptimizer:\n  lr: -1\n  bets: []\nrate: y\nrate: .nan\nlater: now\n"
    found = faults(text, "switch=perhaps", "=5", "shape=[", "size=0", "optimizer.eps=small")
    expected = {
        "c.yaml:1: number: ", "c.yaml:2: unknown key 'numbr'", "c.yaml:4: optimizer.lr: ",
        "c.yaml:5: unknown key 'optimizer.bets'", "c.yaml:7: key 'rate' stands twice", "c.yaml:7: rate: ",
        "c.yaml:8: later: not built yet", "command line: switch: ", 'override "=5": ', 'override "shape=[": ',
        "command line: size: ", "command line: optimizer.eps: ",
    }  # fmt: skip
    assert len(found) == len(expected)
    assert all(any(fault.startswith(start) for fault in found) for start in expected), found


def test_a_missing_key_is_named_with_its_meaning(faults):
    assert faults("optional: 2", model=Required) == [
        "c.yaml: key 'needed' is missing: what must be given",
        "c.yaml: key 'section' is missing: it has no default",
    ]


def test_a_feature_not_built_admits_its_default_alone(load, faults):
    assert load("later: none").later == "none"
    [fault] = faults("later: soon")
    assert fault == 'c.yaml:1: later: not built yet; leave it at "none", got "soon"'


# ── Overrides ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_last_override_wins_over_the_file_and_over_earlier_ones(load):
    config = load("number: 1\noptimizer: {lr: 1.0, eps: 2.0}\n", "number=2", "optimizer.lr=3", "number=4")
    assert (config.number, config.optimizer.lr, config.optimizer.eps) == (4, 3.0, 2.0)


def test_an_override_of_a_section_replaces_all_of_it(load):
    config = load("optimizer: {lr: 1.0, unknown: 2}\n", "optimizer={eps: 1e-3}", "optimizer.betas=[0.1]")
    assert config.optimizer == Inner(lr=0.5, eps=1e-3, betas=[0.1])


@pytest.mark.parametrize("override", ["number", "", "=5", ".lr=5", "optimizer.=5", "optimizer..lr=5", "--number=5",
                                      "number =5", " number=5", "num-ber=5"])  # fmt: skip
def test_what_is_no_override_is_told_how_to_write_one(faults, override):
    [fault] = faults("", override)
    assert override in fault and "key=value" in fault


@pytest.mark.parametrize("value", ["my run #2", "#2", "[0.1] # two", "one\ntwo"])
def test_an_override_of_which_yaml_would_read_only_a_part_is_refused(load, faults, value):
    [fault] = faults("", f"text={value}")
    assert "quote" in fault and "text=" in fault
    assert load("", f"text={json.dumps(value)}").text == value


def test_faults_of_overrides_name_the_command_line(faults):
    assert faults("", "optimizr.lr=1")[0].startswith("command line: unknown key 'optimizr'")
    assert faults("", "optimizer.lr.x=1")[0].startswith("command line: optimizer.lr: ")
    assert faults("rate: 1.0", "rate.x=1")[0].startswith('override "rate.x=1": rate is 1.0')
    assert faults("number: x\n", "number=y") == ['command line: number: should be a whole number, got "y"']
    assert faults("optimizer:\n  lr: x\n", "optimizer={lr: y}")[0].startswith("command line: optimizer.lr: ")
    for broken in ("text=[1", "text={a", "text=\x00", "text=\udcff", "text=a: b: c", "text=*x"):
        [fault] = faults("", broken)
        assert fault.startswith("override ") and "text=" in fault and "YAML" in fault


# ── Paths ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_path_is_looked_for_from_the_current_directory_then_from_the_configs_folder(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, names in ((here, ["both"]), (there, ["both", "only"])):
        folder.mkdir()
        for name in names:
            (folder / name).mkdir()
    (there / "c.yaml").write_text("data: [both, only, builtin]\nfolder: only\noutput: out\ninputs: 'on*'\n")
    monkeypatch.chdir(here)
    config = load_config(Outer, Path("../there/c.yaml"))
    assert config.data == [str(here / "both"), str(there / "only"), "builtin"]
    assert config.folder == there / "only"
    assert config.output == here / "out"
    assert config.inputs == [str(there / "on*")]


def test_a_path_that_is_not_there_is_named_with_the_places_looked_in(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/c.yaml").write_text("folder: nowhere\ninputs: ['no*.txt']\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FemtoError) as caught:
        load_config(Outer, Path("configs/c.yaml"))
    for fault, name in zip(caught.value.faults, ["no*.txt", "nowhere"], strict=True):
        assert str(tmp_path / name) in fault and str(tmp_path / "configs" / name) in fault


@pytest.mark.parametrize("value", ["''", '"a\\0b"', "~nobody-of-this-name/x", "x" * 300, "5", "{a: 1}", "c.yaml/x"])
def test_what_cannot_be_a_path_is_a_fault_like_any_other(faults, value):
    for key in ("folder", "resume", "data", "inputs"):
        [fault] = faults(f"{key}: {value}\n")
        assert fault.startswith(f"c.yaml:1: {key}: ")
    if value not in ("x" * 300, "c.yaml/x"):
        assert faults(f"output: {value}\n")[0].startswith("c.yaml:1: output: ")


def test_resume_is_a_word_or_the_path_of_what_exists(load, faults, tmp_path):
    (tmp_path / "step").mkdir()
    assert [load(f"resume: {word}").resume for word in ("auto", "never", "must")] == ["auto", "never", "must"]
    assert load("resume: step").resume == tmp_path / "step"
    [fault] = faults("resume: always")
    assert "no such file" in fault
    [fault] = faults("resume: [auto]")
    assert "auto, never, must" in fault


def test_a_home_directory_is_expanded(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert load("folder: ~/data").folder == tmp_path / "data"
    assert load("output: ~/out").output == tmp_path / "out"


# ── The resolved config ───────────────────────────────────────────────────────────────────────────────────────────────


def round_trip(config: ConfigModel, folder: Path) -> ConfigModel:
    path = folder / "again.yaml"
    path.write_text(dump_config(config, "femto run x"), encoding="utf-8")
    return load_config(type(config), path)


_ODD = [
    "1e5", "None", "null", "~", "", " ", "true", "off", "010", "3:25", "0x10", "2024-01-01", "-", "- a", "a: b", "#",
    "a #b", "<<", "=", "!!int 5", "&a", "*a", "@", "%", "|", ">", "'", '"', "'\"", "a\nb\n", "\n", "a\n\n b", "\t",
    "\r", "a\r\nb", "é", "😀", "\u2028", "\x85", "a\x85\n", "\x07", "\x00", "\xa0", "\ufeff", "---", "...", "[1]", "{",
    "? x", "x" * 3000, "word " * 3000, "1_000", ".5", ".nan", ".inf", "+1", "\\", "\\n",
]  # fmt: skip


@pytest.mark.parametrize("text", _ODD, ids=lambda text: repr(text)[:20])
def test_any_text_comes_back_from_the_resolved_config(tmp_path, text):
    config = Outer(text=text, maybe=text)
    assert round_trip(config, tmp_path) == config


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.sampled_from("a1: -#'\"\\\n\r\t\x85\u2028\ufeff") | st.characters(codec="utf-8"), max_size=30),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    number=st.integers(-(2**63) + 1, 2**63 - 1),
)
@example(text="", rate=5e-324, number=0)
@example(text="x", rate=1e16, number=2**63 - 1)
@example(text="x", rate=-0.0, number=-(2**63) + 1)
def test_any_values_come_back_from_the_resolved_config_to_the_last_bit(tmp_path, text, rate, number):
    config = Outer(text=text, rate=rate, number=number, optimizer={"lr": abs(rate) or 1.0, "betas": [rate, rate]})
    again = round_trip(config, tmp_path)
    assert again == config and again.rate.hex() == rate.hex()


def test_the_resolved_config_is_complete_opens_with_the_command_and_is_read_as_yaml(load, tmp_path):
    (tmp_path / "tokens").mkdir()
    config = load("data: tokens\noptimizer: {lr: 1e-5}\noutput: out\n")
    text = dump_config(config, "femto run x --config c.yaml")
    assert text.startswith("# femto run x --config c.yaml\n")
    values = yaml.safe_load(text)
    assert values == resolved(config)
    assert set(values) == set(Outer.model_fields) and values["optimizer"] == {
        "lr": 1e-5, "betas": [0.9, 0.95], "eps": None,
    }  # fmt: skip
    assert values["data"] == [str(tmp_path / "tokens")] and values["output"] == str(tmp_path / "out")


def test_a_command_with_a_line_break_stays_a_comment(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(Outer(), "femto run 'a\nnumber: 99\u2028number: 98'"))
    assert load_config(Outer, path) == Outer()


def test_help_tells_every_keys_type_default_and_meaning():
    lines = describe_keys(Outer).splitlines()
    assert [line.split()[0] for line in lines] == [
        "number", "count", "size", "rate", "switch", "text", "maybe", "shape", "optimizer.lr", "optimizer.betas",
        "optimizer.eps", "data", "inputs", "folder", "output", "resume", "later",
    ]  # fmt: skip
    by_key = {line.split()[0]: line for line in lines}
    assert "how far a step goes [default 0.5]" in by_key["optimizer.lr"]
    assert "integer or null" in by_key["size"] and "default null" in by_key["size"]
    assert "round|square" in by_key["shape"]
    assert "not built yet" in by_key["later"]
    assert "[required]" in describe_keys(Required).splitlines()[0]


def test_reading_a_config_imports_no_torch():
    code = "import sys, femtolib.config, femtolib.sections, femtolib.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
