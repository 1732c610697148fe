"""`dpkfc COMMAND` and `python -m dpkfc COMMAND`."""

import sys
from importlib.util import find_spec


def main() -> None:
    """The command line, or one line that says how to install it."""
    if find_spec("typer") is None or find_spec("rich") is None:
        sys.exit("dpkfc: the command line needs two more packages: pip install 'dpkfc[cli]'")
    from dpkfc.app.cli.main import app

    app(prog_name="dpkfc")


if __name__ == "__main__":
    main()
