"""`python -m experiments.preset`: the command line of the experiment."""

from experiments.preset.experiment import main

if __name__ == "__main__":
    main()
