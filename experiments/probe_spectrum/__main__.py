"""`python -m experiments.probe_spectrum`: run parts of the study."""

from experiments.common.study import main
from experiments.probe_spectrum.experiment import STUDY

if __name__ == "__main__":
    main(STUDY)
