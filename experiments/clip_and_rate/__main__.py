"""`python -m experiments.clip_and_rate`: the command line of the experiment."""

from experiments.clip_and_rate.experiment import main

if __name__ == "__main__":
    main()
