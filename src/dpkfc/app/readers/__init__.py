"""Readers of private records and public data sets, from files, folders and by name.

`sources.load` reads any of them. A reader learns nothing from the records on the way: what it does
to a record depends on that record and on what was declared, never on other records.
"""
