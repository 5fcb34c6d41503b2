"""Measurements that compare in one run; `make bench` runs them all."""
