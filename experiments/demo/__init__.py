"""The demo over five seeds: `dpkfc demo` repeated, as a table and a picture.

dpkfc reproduce demo
"""
