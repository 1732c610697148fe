"""`python -m experiments.noise_length`: the command line of the experiment."""

from experiments.noise_length.experiment import main

if __name__ == "__main__":
    main()
