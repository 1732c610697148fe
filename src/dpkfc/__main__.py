"""`python -m dpkfc`: the command line."""

from dpkfc.cli import app

if __name__ == "__main__":
    app(prog_name="dpkfc")
