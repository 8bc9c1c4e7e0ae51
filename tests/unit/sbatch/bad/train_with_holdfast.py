import holdfast

run = holdfast.Run("runs/a")
