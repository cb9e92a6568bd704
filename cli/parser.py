"""The argument parser of the verbs: argparse, whose complaints are one `error:` line like every other fault."""

import argparse
from typing import NoReturn

from femtolib.errors import FemtoError


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser that raises FemtoError, admits no abbreviations and keeps a description's lines."""

    def __init__(self, prog: str, description: str):
        super().__init__(
            prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        raise FemtoError(f"{self.prog}: {message}; {self.prog} --help says more")
