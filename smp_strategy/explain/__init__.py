"""Why the units are where they are: the decision as a tree of the model, as text, JSON or a page with drawings."""
