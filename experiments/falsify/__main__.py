"""`python -m experiments.falsify`: run parts of the study."""

from experiments.common.study import main
from experiments.falsify.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
