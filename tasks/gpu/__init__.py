"""Devices of a node: what is there, how a layout becomes slots, and the stages that lease and return them."""
