"""Code that several experiments share: runs, studies, figures, data sets, options."""
