"""List the recipes, each with what it does and the configs that go with it."""

from femto.parser import Parser
from femto.shipped import about, configs, configs_of, recipes, summary


def main(argv: list[str]) -> int:
    Parser("femto ls", __doc__).parse_args(argv)
    for name, path in recipes().items():
        print(f"{name}\n    {summary(path)}")
        for config in configs_of(name):
            print(f"    {config:<20}{about(configs()[config])}")
        print()
    print("femto run RECIPE --config CONFIG runs one, femto cp NAME DEST copies one to edit.")
    return 0
