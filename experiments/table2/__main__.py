"""`python -m experiments.table2`: run parts of the study."""

from experiments.common.study import main
from experiments.table2.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
