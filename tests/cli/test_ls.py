import subprocess
import sys

from femto.shipped import config_of, configs, recipe_of, recipes, summary


def test_every_recipe_is_listed_with_what_it_does_and_its_configs(femto):
    stdout = femto("ls").stdout
    blocks = {block.split("\n")[0]: block.split("\n")[1:] for block in stdout.split("\n\n")[:-1]}
    assert list(blocks) == list(recipes()) and "single_device_pretrain" in blocks
    for name, (about, *lines) in blocks.items():
        assert about.strip() == summary(recipes()[name]) != ""
        own = [c for c, path in configs().items() if recipe_of(path) == name or c == config_of(recipes()[name])]
        assert [line.split()[0] for line in lines] == own != []
    (line,) = [line for line in blocks["distributed_pretrain"] if "llama_small" in line]
    assert "parameters on the built-in corpus" in line  # the config's second line


def test_the_first_line_of_every_config_is_the_command_that_runs_it():
    for name, path in configs().items():
        recipe = recipe_of(path)
        assert recipe in recipes(), path
        assert path.read_text().splitlines()[0].endswith(f"{recipe} --config configs/{name}.yaml"), path


def test_the_config_in_the_command_of_every_recipes_docstring_is_shipped():
    for path in recipes().values():
        assert config_of(path) in configs(), path


def test_a_summary_is_the_first_sentence_of_the_docstring_on_one_line(tmp_path):
    (tmp_path / "recipe.py").write_text('"""Trains a\nmodel. Then more.\n\nAnd more."""\nimport no_such_module\n')
    assert summary(tmp_path / "recipe.py") == "Trains a model"


def test_ls_and_cp_import_neither_torch_nor_pydantic_nor_a_recipe(tmp_path):
    program = """
import sys
from femto.main import main
assert main(["ls"]) == main(["cp", "single_device_pretrain", "."]) == main(["--help"]) == 0
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "pydantic", "yaml", "numpy", "huggingface_hub"}
assert not loaded, loaded
assert not [name for name in sys.modules if name.startswith("femto.recipes.")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
