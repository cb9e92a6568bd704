"""Reading a config: a YAML file and `key=value` overrides become one checked model, or every fault in them at once.

A config is data. Reading one imports nothing, calls nothing and touches no file but to see whether a named path is
there. Keys are checked by pydantic models (`ConfigModel`: unknown keys and loose types are refused), so a recipe's
`Config` is the only description of its keys; its fields' descriptions are the help text. The sections that recipes
share stand in `sections.py`.
"""

import difflib
import json
import re
import types
import typing
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
    tried = [Path.cwd() / Path(text).expanduser(), _folder(info) / Path(text).expanduser()]
    for path in tried:
        if path.exists():
            return path.resolve()
    raise ValueError("no such file or directory" + _not_found_in(tried))


def _existing_path(value: Any, info: ValidationInfo) -> Any:
    return _existing(value, info) if isinstance(value, str) else value


def _path_or_word(value: Any, info: ValidationInfo) -> Any:
    return value if value in ("auto", "never", "must") else _existing_path(value, info)


def _builtin_or_path(value: Any, info: ValidationInfo) -> Any:
    return value if not isinstance(value, str) or value == "builtin" else str(_existing(value, info))


def _existing_pattern(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or not re.search(r"[*?\[]", value):
        return _builtin_or_path(value, info)
    tried = [Path.cwd() / Path(value).expanduser(), _folder(info) / Path(value).expanduser()]
    for pattern in tried:
        if any(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))):
            return str(pattern)
    raise ValueError("no file matches this pattern" + _not_found_in(tried))


def _absolute(value: Any) -> Any:
    return Path.cwd() / Path(value).expanduser() if isinstance(value, str) and value else value


def _folder(info: ValidationInfo) -> Path:
    return info.context["folder"] if info.context else Path.cwd()


def _not_found_in(tried: list[Path]) -> str:
    return f" (looked for {' and '.join(dict.fromkeys(map(str, tried)))})"


Integer = Annotated[int, BeforeValidator(_whole_number)]
Count = Annotated[Integer, Field(ge=0)]
PositiveInteger = Annotated[Integer, Field(ge=1)]
ExistingPath = Annotated[Path, BeforeValidator(_existing_path)]
BuiltinOrPath = Annotated[str, BeforeValidator(_builtin_or_path)]
BuiltinOrPaths = Annotated[list[BuiltinOrPath], BeforeValidator(_one_or_several), Field(min_length=1)]
InputPatterns = Annotated[
    list[Annotated[str, BeforeValidator(_existing_pattern)]], BeforeValidator(_one_or_several), Field(min_length=1)
]
ResumeFrom = Annotated[Literal["auto", "never", "must"] | Path, BeforeValidator(_path_or_word)]
OutputPath = Annotated[Path, BeforeValidator(_absolute)]


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_config(model: type[ConfigType], path: Path, overrides: typing.Sequence[str] = ()) -> ConfigType:
    """Read `path`, apply `key=value` overrides, check everything; raises FemtoError with one line for each fault."""
    raw = _read(path)
    for override in overrides:
        _apply_override(raw, override)
    try:
        return model.model_validate(raw.values, context={"folder": path.resolve().parent})
    except ValidationError as error:
        lines = [line for fault in error.errors() for line in _describe(fault, model, raw)]
        raise FemtoError(*dict.fromkeys(lines)) from None


def dump_config(config: ConfigModel, command: str) -> str:
    """The resolved config as YAML that `load_config` reads back to the same values; its first line is `command`."""
    text = yaml.dump(resolved(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return f"# {command}\n{text}"


def resolved(config: ConfigModel) -> dict[str, Any]:
    """The config as plain JSON values, every default filled in."""
    return config.model_dump(mode="json")


def describe_keys(model: type[ConfigModel]) -> str:
    """Every key of a recipe's config with its type, default and meaning: the text of `femto run RECIPE --help`."""
    rows = [(key, _type_name(info.annotation, info.metadata), _default_text(info), info.description or "")
            for key, info in _leaves(model)]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
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
    """A config as read: its values, and for each dotted key where it was written."""

    path: Path
    values: dict[str, Any]
    where: dict[str, str] = field(default_factory=dict)

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
        ("merge", r"<<", ["<"]),
    ]:
        style.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)
    return style


@_scalars
class _Loader(yaml.SafeLoader):
    def compose_node(self, parent, index):
        # An alias may stand inside what it names, or multiply a small file into a huge one; a config needs neither.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not read in a config", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


@_scalars
class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data):
        return True


def _parse(text: str, where: str) -> tuple[Any, yaml.Node | None]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_duplicates(node, where)
        return loader.construct_document(node), node
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and where.endswith((".yaml", ".yml")) else ""
        raise FemtoError(f"{where}{line}: not readable as YAML: {error.problem or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FemtoError(f"{where}: not readable as YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()


def _refuse_duplicates(node: yaml.Node, where: str) -> None:
    children = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    if isinstance(node, yaml.ScalarNode):
        return
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise FemtoError(f"{where}:{line}: key {key.value!r} stands twice (first on line {seen[key.value]})")
            seen[str(key.value)] = key.start_mark.line + 1
    for child in children:
        _refuse_duplicates(child, where)


def _read(path: Path) -> _Raw:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FemtoError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise FemtoError(f"{path}: cannot read this config: {error.strerror}") from None
    values, node = _parse(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise FemtoError(f"{path}: a config is a mapping of keys to values, not {show(values)}")
    raw = _Raw(path, values)
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
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise FemtoError(f"override {override!r}: write key=value, for example optimizer.lr=1e-4")
    value, _ = _parse(text, f"override {override!r}")
    *sections, name = key.split(".")
    target = raw.values
    for section in sections:
        if not isinstance(target.get(section), dict):  # null, missing, or a value that the key's own check will name
            target[section] = {}
        target = target[section]
    target[name] = value
    raw.where = {known: place for known, place in raw.where.items() if not known.startswith(f"{key}.")}
    raw.where[key] = "command line"


# ── Faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _describe(fault: dict[str, Any], model: type[ConfigModel], raw: _Raw) -> list[str]:
    key = _dotted(fault["loc"], model)
    place = raw.place(key)
    kind, value, limits = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return [f"{place}: unknown key {key!r}{_nearest(key, model)}"]
    if kind == "missing":
        return [f"{raw.path}: key {key!r} is missing: {_description(key, model)}"]
    if kind == "value_error":
        got = f", got {show(value)}" if key and not isinstance(value, list | dict | ConfigModel) else ""
        return [f"{place}: {key + ': ' if key else ''}{line}{got}" for line in str(limits["error"]).splitlines()]
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
        "is_instance_of": "should be text",
        "path_type": "should be a path",
    }.get(kind, fault["msg"][0].lower() + fault["msg"][1:])
    hint = " (quote it if it is text)" if kind == "string_type" and isinstance(value, int | float) else ""
    return [f"{place}: {key}: {wanted}, got {show(value)}{hint}"]


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
    known = [name for name, _ in _leaves(model)] + [name for name, _ in _sections(model)]
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_name or difflib.get_close_matches(key, known, 1, 0.6)
    if not close:  # a slip in the last name, in whatever section it belongs
        by_last = {name.rpartition(".")[2]: name for name in known}
        close = [by_last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_last, 1, 0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; `femto run RECIPE --help` lists the keys"


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
