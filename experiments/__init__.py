"""One recipe a table or figure."""
