def check_training(make, config, half):
    pass
