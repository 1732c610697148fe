"""`python -m experiments.geometry`: run parts of the study."""

from experiments.common.study import main
from experiments.geometry.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
