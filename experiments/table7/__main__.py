"""`python -m experiments.table7`: the command line of the experiment."""

from experiments.table7.experiment import main

if __name__ == "__main__":
    main()
