"""`python -m dpkfc`: the command line."""

from dpkfc.app.cli.main import app

if __name__ == "__main__":
    app(prog_name="dpkfc")
