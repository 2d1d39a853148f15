"""One prompt taken apart: a linear model of the run, its graph, who carries an edge, what cutting it does.

Imports transcoders, tasks, models and what they import.
"""
