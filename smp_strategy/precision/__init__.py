"""In which precision units compute, gradients are added up, and what keeps small numbers from vanishing."""
