"""`python -m experiments.correlated`: run parts of the study."""

from experiments.common.study import main
from experiments.correlated.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
