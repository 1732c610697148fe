"""`python -m experiments.table5`: the command line of the experiment."""

from experiments.table5.experiment import main

if __name__ == "__main__":
    main()
