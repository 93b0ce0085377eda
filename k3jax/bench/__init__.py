"""Measurements on the machine at hand. Whatever gives a wrong result gets no time."""
