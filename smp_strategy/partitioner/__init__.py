"""Which unit goes to which stage: the problem, its exact solution, and the decision as a file."""
