import re
import sys

import pytest


def test_a_recipe_of_ones_own_runs_with_its_config_and_overrides(femto, here):
    assert femto("run", "./toy.py", "--config", "toy.yaml") == (0, "sum 3\n", "")
    assert femto("run", "toy.py", "--config=toy.yaml", "right=5").stdout == "sum 7\n"


def test_the_exit_code_is_what_main_returns(femto, here):
    assert femto("run", "toy.py", "--config", "toy.yaml", "left=-1").code == 3


def test_what_stands_beside_a_recipe_can_be_imported_by_it(femto, here):
    (here / "theirs").mkdir()
    (here / "theirs" / "sum_of_two.py").write_text("def add(a, b): return f'{a} and {b}'\n")
    toy = (here / "toy.py").read_text()
    toy = toy.replace("config.left + config.right", "add(config.left, config.right)")
    (here / "theirs" / "toy.py").write_text(toy.replace("class Config", "from sum_of_two import add\n\n\nclass Config"))
    assert femto("run", "theirs/toy.py", "--config", "toy.yaml").stdout == "sum 2 and 1\n"


def test_a_recipe_keeps_its_own_name_so_that_a_worker_can_import_what_it_defines(femto, here):
    (here / "named.py").write_text((here / "toy.py").read_text() + "\n\nassert __name__ == 'named'\n")
    assert femto("run", "named.py", "--config", "toy.yaml").code == 0
    (here / "json.py").write_text((here / "toy.py").read_text())
    assert femto("run", "json.py", "--config", "toy.yaml").code == 0
    assert hasattr(sys.modules["json"], "loads")


def test_launcher_variables_mean_nothing_to_a_single_recipe(femto, here, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert femto("run", "toy.py", "--config", "toy.yaml").code == 0


def test_the_help_of_a_recipe_is_its_docstring_and_its_keys(femto, here, capsys):
    with pytest.raises(SystemExit) as ended:
        femto("run", "toy.py", "--help")
    assert ended.value.code == 0
    stdout = capsys.readouterr().out
    assert "femto run toy.py" in stdout and "A toy. It adds." in stdout and "left" in stdout and "right" in stdout


def test_the_recipes_of_data_parallelism_are_listed_and_their_help_names_their_keys(femto, here, capsys):
    stdout = femto("ls").stdout
    for recipe, keys in (
        ("data_parallel_pretrain", (
            "processes", "accumulate_in", "max_grad_value", "gradient_sync.bucket_mb", "gradient_sync.overlap",
            "gradient_sync.communication_dtype", "gradient_sync.find_unused_parameters", "gradient_sync.static_graph",
            "optimizer.lr_reference_batch_size", "float16",
        )),
        ("parity", ("recipe", "config", "overrides", "steps", "tolerance", "layouts")),
    ):  # fmt: skip
        assert stdout.startswith(f"{recipe}\n") or f"\n{recipe}\n" in stdout
        with pytest.raises(SystemExit) as ended:
            femto("run", recipe, "--help")
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert f"femto run {recipe}" in shown
        for key in keys:
            assert re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", shown), key


def test_a_recipe_that_starts_its_processes_itself_is_not_launched_as_well(femto, here, write_config, tiny_llama):
    path = write_config({"model": tiny_llama, "data": {"train": "builtin"}, "max_steps": 1})
    arguments = ("data_parallel_pretrain", "--config", path, "device=cpu", "processes=2")
    for options in (["--nproc-per-node", "2"], ["--nproc-per-node=1"]):
        ended = femto("run", *options, *arguments)
        wanted = "processes: 2 is for a run without torchrun's options: leave out the one or the others"
        assert (ended.code, ended.error) == (2, wanted)
    assert not (path.parent / "output").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "which recipe?"),
        (["tyo.py", "--config", "toy.yaml"], "there is no recipe 'tyo.py'; did you mean 'toy.py'?"),
        (["./tyo.py", "--config", "toy.yaml"], "did you mean 'toy.py'?"),
        (["singel_device_pretrain"], "did you mean 'single_device_pretrain'?"),
        (["recipes/single_device_pretrain.py"], "did you mean 'single_device_pretrain'?"),
        (["toy.py", "--config", "toi.yaml"], "there is no config 'toi.yaml'; did you mean 'toy.yaml'?"),
        (["toy.py", "--config", "lama_small"], "did you mean 'llama_small'?"),
        (["toy.py", "--config", "configs/lama_small.yaml"], "did you mean 'llama_small'?"),
        (["toy.py", "toy.yaml"], "toy.py needs --config CONFIG"),
        (["single_device_pretrain"], "needs --config CONFIG; there are: llama_small, tiny/pretrain"),
        (["toy.py", "--config", "toy.yaml", "left=two"], "left: should be a whole number"),
        (["toy.py", "--config", "toy.yaml", "lefft=2"], "did you mean 'left'?"),
        (["--nnodes", "2", "toy.py", "--config", "toy.yaml"], "takes no torchrun options: remove --nnodes 2"),
        (["--standalone", "toy.py", "--config", "toy.yaml"], "takes no torchrun options: remove --standalone"),
        (["--config", "toy.yaml", "toy.py"], "unrecognized arguments: --config; only torchrun's options"),
        (["--nnodes", "2"], "only torchrun's options stand before RECIPE"),
    ],
)
def test_a_wrong_command_is_one_line_that_names_the_nearest_right_one(femto, here, arguments, wanted):
    ended = femto("run", *arguments)
    assert ended.code == 2
    assert wanted in ended.error


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("x = 1\n", "broken.py is not a recipe: it lacks Config and main"),
        ("class Config: pass\n", "it lacks main"),
        ("Config, main, LAUNCH = 1, 2, 'distribted'\n", "LAUNCH is 'distribted'; did you mean 'distributed'?"),
    ],
)
def test_a_file_that_is_no_recipe_says_what_it_lacks(femto, here, source, wanted):
    (here / "broken.py").write_text(source)
    ended = femto("run", "broken.py", "--config", "toy.yaml")
    assert ended.code == 2
    assert wanted in ended.error


def test_a_recipe_that_no_process_of_its_own_could_import_is_refused(femto, here):
    (here / "my.recipe.py").write_text("Config, main = 1, 2\n")
    ended = femto("run", "my.recipe.py", "--config", "toy.yaml")
    assert ended.code == 2 and "my.recipe.py: a recipe is imported" in ended.error


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def main(:\n", "SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_fault_in_a_recipe_of_ones_own_is_shown_from_its_own_first_line_on(femto, here, source, last):
    (here / "broken.py").write_text(source)
    ended = femto("run", "broken.py", "--config", "toy.yaml")
    assert ended.code == 1
    lines = ended.stderr.splitlines()
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert set(files) == {str(here / "broken.py")}
    assert lines[-2:] == [last, "error: broken.py could not be imported; its traceback stands above"]


def test_a_file_here_comes_before_a_shipped_config_of_the_same_name(femto, here):
    from femto.shipped import configs, find_config

    name, shipped = next(iter(configs().items()))
    assert find_config(name) == find_config(f"{name}.yaml") == find_config(f"configs/{name}.yaml") == shipped
    (here / "configs" / name).parent.mkdir(parents=True)
    (here / "configs" / f"{name}.yaml").write_text("left: 40\n")
    assert femto("run", "toy.py", "--config", f"configs/{name}.yaml").stdout == "sum 41\n"
    assert find_config(name) == shipped
