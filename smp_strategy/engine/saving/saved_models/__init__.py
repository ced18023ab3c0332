"""Folders of models that other libraries read, written by all ranks without gathering the model.

Reading order::

    pretrained_calls.py  save_pretrained, push_to_hub and num_parameters of models of transformers and PEFT;
                         state_dict and load_state_dict
    spread_saving.py     model files of a partitioned model, as the libraries write them
    state_folders.py     folders that never look complete before they are
    shared_states.py     a full state on every rank, with one copy per machine
"""
