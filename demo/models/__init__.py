"""The models that the demo builds: run in the converting environment, importable everywhere."""
