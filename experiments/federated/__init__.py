"""DP-SGD and DP-KFC clients in a federation that Flower simulates.

Runs as `dpkfc reproduce federated`, in an environment with `pip install 'dpkfc[cli,flower]'`.
"""
