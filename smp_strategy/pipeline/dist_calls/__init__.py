"""Collectives of the user, in a step.

user_collectives    Redirection to the replicas; [Note: collectives mean replicas].
collective_results  Results without communication.
process_counts      Numbers of processes outside of ``torch.distributed``.
"""
