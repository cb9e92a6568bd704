import os

import pytest

from femto.shipped import configs, recipes

RECIPE = "single_device_pretrain"


@pytest.mark.parametrize("name", [RECIPE, f"{RECIPE}.py", f"recipes/{RECIPE}.py"])
def test_a_recipe_is_copied_byte_by_byte_under_the_name_asked_for(femto, here, name):
    ended = femto("cp", name, "mine.py")
    assert ended.code == 0
    assert (here / "mine.py").read_bytes() == recipes()[RECIPE].read_bytes()
    assert "femto run mine.py --config llama_small" in ended.stdout


@pytest.mark.parametrize("name", ["llama_small", "llama_small.yaml", "configs/llama_small", "configs/llama_small.yaml"])
def test_a_config_is_copied_into_a_folder_under_its_own_name(femto, here, name):
    (here / "folder").mkdir()
    ended = femto("cp", name, "folder")
    assert ended.code == 0
    assert (here / "folder" / "llama_small.yaml").read_bytes() == configs()["llama_small"].read_bytes()
    assert "femto run distributed_pretrain --config folder/llama_small.yaml" in ended.stdout


def test_a_name_that_a_recipe_and_a_config_share_means_what_the_copy_is_called(femto, here):
    assert femto("cp", "preprocess", "mine.py").code == femto("cp", "preprocess", "mine.yaml").code == 0
    assert (here / "mine.py").read_bytes() == recipes()["preprocess"].read_bytes()
    assert (here / "mine.yaml").read_bytes() == configs()["preprocess"].read_bytes()
    ended = femto("cp", "preprocess", ".")
    assert ended.code == 2 and "say recipes/preprocess.py or configs/preprocess.yaml" in ended.error


def test_nothing_is_overwritten_without_force(femto, here):
    (here / "mine.py").write_text("mine")
    ended = femto("cp", RECIPE, "mine.py")
    assert ended.code == 2 and ended.error == "mine.py exists; --force replaces it"
    assert (here / "mine.py").read_text() == "mine"
    assert femto("cp", RECIPE, "mine.py", "--force").code == 0
    assert (here / "mine.py").read_bytes() == recipes()[RECIPE].read_bytes()

    os.symlink("nowhere", here / "link.py")
    assert femto("cp", RECIPE, "link.py").code == 2
    assert sorted(os.listdir(here)) == ["link.py", "mine.py", "toy.py", "toy.yaml"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["singel_device_pretrain", "."], "did you mean 'single_device_pretrain'?"),
        (["lama_small.yaml", "."], "did you mean 'llama_small'?"),
        (["../configs/llama_small", "."], "there is no recipe or config"),
        ([RECIPE, "mine"], "mine: no such folder, and a copy of single_device_pretrain.py needs a name in .py"),
        ([RECIPE, "mine.yaml"], "needs a name in .py"),
        ([RECIPE, "nowhere/mine.py"], "nowhere/mine.py: there is no folder nowhere"),
        ([RECIPE, "toy.py/mine.py"], "toy.py/mine.py: there is no folder toy.py"),
        ([RECIPE], "the following arguments are required: DEST"),
    ],
)
def test_a_wrong_copy_is_one_line_and_leaves_nothing(femto, here, arguments, wanted):
    ended = femto("cp", *arguments)
    assert ended.code == 2
    assert wanted in ended.error
    assert sorted(os.listdir(here)) == ["toy.py", "toy.yaml"]
