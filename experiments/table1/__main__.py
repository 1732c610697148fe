"""`python -m experiments.table1`: run parts of the study."""

from experiments.common.study import main
from experiments.table1.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
