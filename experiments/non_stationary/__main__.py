"""`python -m experiments.non_stationary`: run parts of the study."""

from experiments.common.study import main
from experiments.non_stationary.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
