"""Reading a config: a YAML file and `key=value` overrides become one checked model, or every fault in them at once.

A config is data. Reading one imports nothing, calls nothing and touches no file but to see whether a named path is
there. Keys are checked by pydantic models (`ConfigModel`: unknown keys and loose types are refused), so a recipe's
`Config` is the only description of its keys; its fields' descriptions are the help text. The sections that recipes
share stand in `sections.py`.
"""

import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticUndefined

from femtolib.errors import FemtoError

ConfigType = TypeVar("ConfigType", bound="ConfigModel")


class ConfigModel(BaseModel):
    """A config, or a section of one: unknown keys, wrong types and numbers out of bounds are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*")
    @classmethod
    def _only_the_default_is_built(cls, value: Any, info: ValidationInfo) -> Any:
        about = cls.model_fields[info.field_name]
        if about.json_schema_extra == _NOT_BUILT and value != about.default:
            raise ValueError(f"not built yet; leave it at {show(about.default)}")
        return value


_NOT_BUILT = {"built": False}


def not_built(default: Any, description: str) -> Any:
    """A key that exists while its feature does not yet: any value but the default is refused with that reason."""
    return Field(default, description=f"{description} (not built yet)", json_schema_extra=_NOT_BUILT)


# ── Types that fields share ───────────────────────────────────────────────────────────────────────────────────────────


def _whole_number(value: Any) -> Any:
    """`5e9` is how people write a large whole number; YAML calls it a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _existing(text: str, info: ValidationInfo) -> Path:
    """Looked for from the current directory, then from the folder of the config file."""
    tried = [Path.cwd() / _path(text), _folder(info) / _path(text)]
    for path in tried:
        if os.path.exists(path):  # Path.exists raises for a name that is too long or a folder that may not be read
            return path.resolve()
    raise ValueError("no such file or directory" + _not_found_in(tried))


def _existing_path(value: Any, info: ValidationInfo) -> Any:
    return _existing(value, info) if isinstance(value, str) else value


def _path_or_word(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str | Path):  # here, where it is one fault; the union would find two
        raise ValueError("should be auto, never, must or the path of a checkpoint")
    return value if value in ("auto", "never", "must") else _existing_path(value, info)


def _builtin_or_path(value: Any, info: ValidationInfo) -> Any:
    return value if not isinstance(value, str) or value == "builtin" else str(_existing(value, info))


def _existing_pattern(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or not re.search(r"[*?\[]", value):
        return _builtin_or_path(value, info)
    tried = [Path.cwd() / _path(value), _folder(info) / _path(value)]
    for pattern in tried:
        if any(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
            return str(pattern)
    raise ValueError("no file matches this pattern" + _not_found_in(tried))


def _absolute(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    path = Path.cwd() / _path(value)
    try:
        str(path).encode()
    except UnicodeEncodeError:  # it could not be written into a config
        raise ValueError(f"the path {str(path)!a} is not UTF-8") from None
    return path


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("should be a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("no such user") from None


def _folder(info: ValidationInfo) -> Path:
    return info.context["folder"] if info.context else Path.cwd()


def _not_found_in(tried: list[Path]) -> str:
    return f" (looked for {' and '.join(dict.fromkeys(map(str, tried)))})"


# What an int64 holds: beyond it torch and numpy fail each in their own way, with a traceback.
Integer = Annotated[int, BeforeValidator(_whole_number), Field(gt=-(2**63), lt=2**63)]
Count = Annotated[Integer, Field(ge=0)]
PositiveInteger = Annotated[Integer, Field(ge=1)]
ExistingPath = Annotated[Path, BeforeValidator(_existing_path)]
BuiltinOrPath = Annotated[str, BeforeValidator(_builtin_or_path)]
InputPatterns = Annotated[
    list[Annotated[str, BeforeValidator(_existing_pattern)]], BeforeValidator(_one_or_several), Field(min_length=1)
]
ResumeFrom = Annotated[Literal["auto", "never", "must"] | Path, BeforeValidator(_path_or_word)]
OutputPath = Annotated[Path, BeforeValidator(_absolute)]


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


RESOLVED = "Written by the run, every default filled in; can be run as it is."


def load_config(model: type[ConfigType], path: Path, overrides: typing.Sequence[str] = ()) -> ConfigType:
    """Read `path`, apply `key=value` overrides, check everything; raises FemtoError with one line for each fault."""
    raw = _read(path)
    faults = raw.faults
    for override in overrides:
        try:
            _apply_override(raw, override)
        except FemtoError as error:
            faults += error.faults
    try:
        config = model.model_validate(raw.values, context={"folder": path.resolve().parent})
    except ValidationError as error:
        faults += [line for fault in error.errors() for line in _describe(fault, model, raw)]
        this = Path(getattr(sys.modules.get(model.__module__), "__file__", "")).stem
        in_file = any(fault.startswith(f"{path}:") and ": unknown key " in fault for fault in faults)
        if in_file and raw.recipe not in (None, this):
            faults.append(f"{path}: is of {raw.recipe}, by its first line: remove the keys that this recipe has not")
    if faults:
        raise FemtoError(*dict.fromkeys(faults))
    return config


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`: keys as a person writes them on the command line."""
    flat = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def dump_config(config: ConfigModel, command: str) -> str:
    """The resolved config as YAML that `load_config` reads back to the same values, below `command` and RESOLVED."""
    text = yaml.dump(resolved(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    comment = "\n".join(f"# {line}" for line in [*command.splitlines(), RESOLVED])
    return f"{comment}\n{text}"


def resolved(config: ConfigModel) -> dict[str, Any]:
    """The config as plain JSON values, every default filled in."""
    return config.model_dump(mode="json")


def describe_keys(model: type[ConfigModel]) -> str:
    """Every key of a recipe's config with its type, default and meaning: the text of `femto run RECIPE --help`."""
    rows = [(key, _type_name(info.annotation, info.metadata), _default_text(info), info.description or "")
            for key, info in _leaves(model)]  # fmt: skip
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(
        f"  {key:<{widths[0]}}  {kind:<{widths[1]}}  {description}{' ' if description else ''}[{default}]"
        for key, kind, default, description in rows
    )


def show(value: Any) -> str:
    """A value as it would stand in YAML, on one line of bounded length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


# ── The file ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Raw:
    """A config as read: its values, the shipped recipe that its first line runs, for each dotted key where it was
    written, and the keys that stand twice."""

    path: Path
    values: dict[str, Any]
    recipe: str | None
    where: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def place(self, key: str) -> str:
        """Where `key`, or the nearest section around it, was written."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, str(self.path))


def _scalars(style: type) -> type:
    """Give a YAML loader or dumper the scalars of YAML 1.2, and `None`: PyYAML's own read 1e-5 as text, 010 as 8,
    3:25 as 205 and off as false, and take the word None for a text."""
    style.yaml_implicit_resolvers = {}
    for tag, pattern, first in [
        ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
        (
            "float",
            r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            list("-+0123456789."),
        ),
    ]:
        style.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)
    return style


@_scalars
class _Loader(yaml.SafeLoader):
    """Reads mappings, lists and scalars as they stand. A key is text, whatever it looks like.

    An alias may stand inside what it names, or multiply a small file into a huge one; a tag (`!!int`, `!!python/…`)
    asks for another type, or a call. A config needs neither.
    """

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _fault("aliases (*name) are not read in a config", event)
        if event.tag:
            raise _fault(f"tags ({event.tag.replace('tag:yaml.org,2002:', '!!')}) are not read in a config", event)
        node = super().compose_node(parent, index)
        if isinstance(parent, yaml.MappingNode) and index is None:
            if not isinstance(node, yaml.ScalarNode):
                raise _fault("a key should be a word", event)
            node.tag = "tag:yaml.org,2002:str"
        return node


def _fault(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


@_scalars
class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # Outside double quotes YAML folds line breaks, and PyYAML loses some that Unicode knows.
        style = '"' if text.splitlines() not in ([], [text]) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _parse(text: str, at: Callable[[int], str]) -> tuple[Any, yaml.Node | None, list[str]]:
    """The value that `text` is, its node, and a fault for each key that stands twice; `at` says where a line stands."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return loader.construct_document(node) if node else None, node, _duplicates(node, at)
    except yaml.MarkedYAMLError as error:
        line, problem = (error.problem_mark or error.context_mark).line + 1, error.problem or error.context
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, f"it has the character {chr(error.character)!r}"
    except RecursionError:
        line, problem = 1, "it is nested too deeply"
    except ValueError:  # Python reads no integer of more than 4,300 digits
        line, problem = 1, "it has a number too long to be read"
    raise FemtoError(f"{at(line)}: not readable as YAML: {problem}")


def _duplicates(node: yaml.Node | None, at: Callable[[int], str]) -> list[str]:
    faults: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                faults.append(f"{at(line)}: key {key.value!r} stands twice (first in line {seen[key.value]})")
            seen.setdefault(key.value, line)
            faults += _duplicates(value, at)
    elif isinstance(node, yaml.SequenceNode):
        faults += [fault for item in node.value for fault in _duplicates(item, at)]
    return faults


_LARGEST = 1_000_000  # bytes; the reader takes some 10 s for more, and it is a data file taken for a config


def _read(path: Path) -> _Raw:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FemtoError(f"{path}:{line}: not UTF-8 text (byte {error.start} of the file)") from None
    except OSError as error:
        raise FemtoError(f"{path}: cannot read this config: {error.strerror}") from None
    if len(content) > _LARGEST:
        raise FemtoError(f"{path}: longer than {_LARGEST:,} bytes: no config is")
    values, node, duplicates = _parse(text, lambda line: f"{path}:{line}")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise FemtoError(f"{path}: a config is a mapping of keys to values, not {show(values)}")
    shipped = re.match(r"# femto run (?:.* )?(\w+) --config ", text)
    raw = _Raw(path, values, recipe=shipped and shipped[1], faults=duplicates)
    if isinstance(node, yaml.MappingNode):
        _note_lines(node, "", raw)
    return raw


def _note_lines(node: yaml.MappingNode, prefix: str, raw: _Raw) -> None:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        raw.where[dotted] = f"{raw.path}:{key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode):
            _note_lines(value, f"{dotted}.", raw)


def _apply_override(raw: _Raw, override: str) -> None:
    key, equals, text = override.partition("=")
    where = f"override {show(override)}"
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise FemtoError(f"{where}: write key=value, for example optimizer.lr=1e-4")
    value, node, duplicates = _parse(text, lambda line: where)
    raw.faults += duplicates
    # YAML takes what follows ' #' for a comment, and a line break for a space: half a value, or another, is a lie.
    if text[node.end_mark.index if node else 0 :].strip() or (type(value) is str and not node.style and "\n" in text):
        raise FemtoError(f"{where}: quote a value that holds ' #' or a line break: {key}={show(json.dumps(text))}")
    *sections, name = key.split(".")
    target = raw.values
    for depth, section in enumerate(sections, 1):
        if target.get(section) is None:
            target[section] = {}
            raw.where[".".join(sections[:depth])] = "command line"
        target = target[section]
        if not isinstance(target, dict):
            raise FemtoError(f"{where}: {'.'.join(sections[:depth])} is {show(target)}, not a section of keys")
    target[name] = value
    raw.where = {known: place for known, place in raw.where.items() if not known.startswith(f"{key}.")}
    raw.where[key] = "command line"


# ── Faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _describe(fault: dict[str, Any], model: type[ConfigModel], raw: _Raw) -> list[str]:
    key = _dotted(fault["loc"], model)
    place = raw.place(key)
    kind, value, limits = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        if any(isinstance(part, int) for part in fault["loc"]):  # of a section in a list: `key` is the list
            return [f"{place}: {key}: unknown key {fault['loc'][-1]!r}"]
        return [f"{place}: unknown key {key!r}{_nearest(key, model)}"]
    if kind == "missing":
        return [f"{raw.path}: key {key!r} is missing: {_description(key, model)}"]
    if kind == "value_error" and isinstance(value, list | dict | ConfigModel):  # of a section: lines name its keys
        lines = str(limits["error"]).splitlines()
        keys = [f"{key}.{_first_name(line)}".lstrip(".") for line in lines]
        return [f"{raw.place(k)}: {key + ': ' if key else ''}{line}" for k, line in zip(keys, lines, strict=True)]
    if kind == "value_error":
        return [f"{place}: {key}: {limits['error']}, got {show(value)}"]
    wanted = {
        "int_type": "should be a whole number",
        "int_from_float": "should be a whole number",
        "float_type": "should be a number",
        "bool_type": "should be true or false",
        "string_type": "should be text",
        "list_type": "should be a list",
        "model_type": "should be a section of keys",
        "model_attributes_type": "should be a section of keys",
        "dict_type": "should be a section of keys",
        "finite_number": "should be a finite number",
        "literal_error": f"should be {limits.get('expected')}",
        "greater_than": f"should be above {limits.get('gt')}",
        "greater_than_equal": f"should be at least {limits.get('ge')}",
        "less_than": f"should be below {limits.get('lt')}",
        "less_than_equal": f"should be at most {limits.get('le')}",
        "is_instance_of": "should be a path",
        "path_type": "should be a path",
    }.get(kind, fault["msg"][0].lower() + fault["msg"][1:])
    hint = " (quote it if it is text)" if kind == "string_type" and isinstance(value, int | float) else ""
    return [f"{place}: {key}: {wanted}, got {show(value)}{hint}"]


def _first_name(line: str) -> str:
    """The key that a fault found by a section itself is about, if it opens with one."""
    return re.sub(r"^unknown key '|\W.*", "", line)


def _dotted(location: tuple[str | int, ...], model: type[ConfigModel]) -> str:
    """pydantic's location of a fault, less what is no key: places in lists, branches of unions."""
    names: list[str] = []
    section: type[ConfigModel] | None = model
    for part in location:
        if section is None:
            break
        names.append(str(part))
        about = section.model_fields.get(str(part))
        section = _section_of(about.annotation) if about else None
    return ".".join(names)


def _nearest(key: str, model: type[ConfigModel]) -> str:
    """Advice: the key of the same name in another section, else the closest name in this one, else in any."""
    known = [name for name, _ in _leaves(model)] + [name for name, _ in _sections(model)]
    if key in known:  # `optimizer.lr: 1` in a file
        section, _, name = key.rpartition(".")
        return f"; in a file, write {name!r} below {section + ':'!r}"
    section, _, last = key.rpartition(".")
    anywhere = {name.rpartition(".")[2]: name for name in known}
    here = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    for names, likeness in ((anywhere, 1.0), (here, 0.6), (anywhere, 0.7)):
        if close := difflib.get_close_matches(last.lower(), names, 1, likeness):
            return f"; did you mean {names[close[0]]!r}?"
    return "; `femto run RECIPE --help` lists the keys"


def _description(key: str, model: type[ConfigModel]) -> str:
    return dict([*_leaves(model), *_sections(model)])[key].description or "it has no default"


# ── Looking into the models ───────────────────────────────────────────────────────────────────────────────────────────


def _section_of(annotation: Any) -> type[ConfigModel] | None:
    candidates = typing.get_args(annotation) if _is_union(annotation) else [annotation]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, ConfigModel):
            return candidate
    return None


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _leaves(model: type[ConfigModel], prefix: str = ""):
    for name, info in model.model_fields.items():
        section = _section_of(info.annotation)
        if section:
            yield from _leaves(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _sections(model: type[ConfigModel], prefix: str = ""):
    for name, info in model.model_fields.items():
        if section := _section_of(info.annotation):
            yield f"{prefix}{name}", info
            yield from _sections(section, f"{prefix}{name}.")


def _default_text(info: Any) -> str:
    default = info.get_default(call_default_factory=True)
    return "required" if default is PydanticUndefined else f"default {show(default)}"


def _type_name(annotation: Any, metadata: list[Any] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if _is_union(annotation):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    names = {int: "integer", float: "number", bool: "true|false", str: "text", Path: "path", type(None): "null"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
